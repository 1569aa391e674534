"""Deploys two replicas on a Ray with two pretended GPUs, and prints the GPUs that each replica sees."""

from __future__ import annotations

import json
import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
from ray import serve

from aengine.ray_serve import deploy
from aengine.ray_serve.replica import EngineReplica


class Seeing(EngineReplica):
    def visible_devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    ray.init(num_cpus=4, num_gpus=2, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(proxy_location="Disabled")
        deploy.EngineReplica = Seeing  # type: ignore[misc]
        knobs = {"replicas": 2, "gpus": 1, "device": "cpu", "torch_threads": 1, "progress": False}
        serve.run(deploy.application(knobs), name="devices", route_prefix="/")
        seen = serve.get_deployment_handle(deploy.ENGINE, "devices").broadcast("visible_devices").results(timeout_s=30)
        print(f"seen {json.dumps(seen)}", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

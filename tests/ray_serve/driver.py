"""Runs replicas on its own Ray while its standard input is open. A line there deploys them again.

python -m tests.ray_serve.driver PORT NAME knob=value ...
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray
from ray import serve

from aengine.ray_serve import app


def main() -> None:
    port, name, *words = sys.argv[1:]
    ray.init(num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": int(port)})
        while words:
            serve.run(app(dict(word.split("=", 1) for word in words)), name=name, route_prefix="/")
            print("deployed", flush=True)
            words = sys.stdin.readline().split()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()

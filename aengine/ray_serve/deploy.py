"""The Serve application: its two deployments, and Ray's options made from our knobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from aengine.config import EngineConfig, ReplicasConfig, ServerConfig
from aengine.config.configure import configure, unknown_knob
from aengine.errors import ConfigError
from aengine.ray_serve.ingress import Ingress
from aengine.ray_serve.replica import EngineReplica

ENGINE = "engine"  # the deployments' names
INGRESS = "ingress"
_MAX_REQUESTS = 100_000  # at once, for Ray; the engine's own queue is the real bound
_REPORT_SECONDS = 1.0
_HEALTH_SECONDS = 2.0


def application(knobs: Mapping[str, Any]) -> Application:
    """Return the application with these knobs. Raises `ConfigError`."""
    kinds = (EngineConfig, ServerConfig, ReplicasConfig)
    known = {name for kind in kinds for name in kind.__struct_fields__}
    if unknown := knobs.keys() - known:
        raise ConfigError(unknown_knob(min(unknown), known))
    replicas = configure(ReplicasConfig, **_knobs_of(ReplicasConfig, knobs))
    engine = configure(EngineConfig, **_knobs_of(EngineConfig, knobs))
    server = configure(ServerConfig, **_knobs_of(ServerConfig, knobs))
    if server.kept_responses and replicas.ingresses > 1:
        raise ConfigError("kept_responses: with several ingresses none knows which replica keeps a response")
    gpus = _gpus(replicas, engine)
    if engine.tensor_parallel_size == "auto" and gpus > 1:
        engine = configure(EngineConfig, {}, **{**msgspec.to_builtins(engine), "tensor_parallel_size": gpus})
    engines = serve.deployment(EngineReplica).options(
        name=ENGINE,
        **_scale(replicas),
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": gpus},
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=replicas.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config=RequestRouterConfig(
            request_router_class="aengine.ray_serve.request_router:PrefixRequestRouter",
            request_router_kwargs={"policy": replicas.routing, "max_keys": replicas.max_routing_keys},
            request_routing_stats_period_s=_REPORT_SECONDS,
        ),
    )
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name=INGRESS,
        num_replicas=replicas.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_REQUESTS,
        graceful_shutdown_timeout_s=replicas.drain_timeout,
    )
    knobs_of_engine = msgspec.to_builtins(engine), msgspec.to_builtins(server)
    return ingress.bind(engines.bind(*knobs_of_engine), knobs_of_engine[1], replicas.accept_timeout)


def _knobs_of(kind: type[msgspec.Struct], knobs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: knobs[name] for name in kind.__struct_fields__ if name in knobs}


def _scale(replicas: ReplicasConfig) -> dict[str, Any]:
    if replicas.max_replicas is None:
        return {"num_replicas": replicas.replicas}
    if replicas.max_replicas < replicas.replicas:
        raise ConfigError(f"max_replicas: {replicas.max_replicas} is less than replicas, {replicas.replicas}")
    targets = {"requests": replicas.target_requests, "kv_usage": replicas.target_kv_usage}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.replicas,
            max_replicas=replicas.max_replicas,
            target_ongoing_requests=replicas.target_requests,
            policy=AutoscalingPolicy(
                policy_function="aengine.ray_serve.autoscaling:ScalingPolicy", policy_kwargs={"targets": targets}
            ),
        )
    }


def _gpus(replicas: ReplicasConfig, engine: EngineConfig) -> int:
    """Return the GPUs of each engine."""
    if replicas.gpus is not None:
        return replicas.gpus
    if engine.tensor_parallel_size != "auto" and engine.tensor_parallel_size > 1:
        return engine.tensor_parallel_size
    has_gpu = ray.cluster_resources().get("GPU", 0) > 0 if ray.is_initialized() else Path("/dev/nvidiactl").exists()
    return int(has_gpu and engine.device != "cpu")

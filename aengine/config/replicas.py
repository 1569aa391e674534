"""The knobs of replicas on Ray Serve."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ReplicasConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of replicas on Ray Serve."""

    replicas: Annotated[int, Meta(ge=1, description="engines; with max_replicas: the fewest of them")] = 1
    max_replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="most engines; where given, Ray adds and removes them as queue and KV use demand"),
    ] = None
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="GPUs of each engine; default: tensor_parallel_size, or 1 where there is any, or none"),
    ] = None
    cpus: Annotated[float, Meta(ge=0, description="cores that Ray sets aside for each engine")] = 1.0
    ingresses: Annotated[
        int, Meta(ge=1, description="processes that take requests and route them; each learns what is cached by itself")
    ] = 1
    routing: Annotated[
        Literal["prefix", "random"],
        Meta(description="prefix: to where a prompt's beginning is cached; random: anywhere"),
    ] = "prefix"
    max_routing_keys: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="most beginnings of prompts that a router remembers (about 250 bytes each); default: 4,096 a "
            "replica, from 2**20 to 2**23 in all"
        ),
    ] = None
    target_requests: Annotated[
        float, Meta(gt=0, description="requests of an engine, running or waiting, beyond which one is added")
    ] = 64.0
    target_kv_usage: Annotated[
        float, Meta(gt=0, le=1, description="share of the KV pages in use beyond which an engine is added")
    ] = 0.8
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds that an engine's answers may take to finish when it is removed")
    ] = 600.0
    accept_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request may wait while there is no engine at all")
    ] = 10.0

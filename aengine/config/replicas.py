"""The knobs of replicas on Ray Serve."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class ReplicasConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The knobs of replicas on Ray Serve."""

    replicas: Annotated[int, Meta(ge=1, description="engines; with max_replicas: the fewest")] = 1
    max_replicas: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="most engines; if set, Ray adds and removes engines by queue and KV usage"),
    ] = None
    gpus: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="GPUs of each engine; default: tensor_parallel_size, or 1 if the machine has a GPU, or 0"),
    ] = None
    cpus: Annotated[float, Meta(ge=0, description="cores that Ray reserves for each engine")] = 1.0
    ingresses: Annotated[
        int,
        Meta(ge=1, description="processes that accept and route requests; each has its own record of what is cached"),
    ] = 1
    routing: Annotated[
        Literal["prefix", "random"],
        Meta(description="prefix: to the replica with a prompt's prefix in its cache; random: to any"),
    ] = "prefix"
    max_routing_keys: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(
            description="most prefixes that a router remembers (about 250 bytes each); default: 4,096 per replica, and "
            "from 2**20 to 2**23 in total"
        ),
    ] = None
    target_requests: Annotated[
        float, Meta(gt=0, description="requests per engine, running or waiting, above which an engine is added")
    ] = 64.0
    target_kv_usage: Annotated[
        float, Meta(gt=0, le=1, description="share of KV pages in use above which an engine is added")
    ] = 0.8
    drain_timeout: Annotated[
        float, Meta(ge=0, description="seconds in which answers may finish when an engine is removed")
    ] = 600.0
    accept_timeout: Annotated[
        float, Meta(gt=0, description="seconds that a request may wait while there is no engine")
    ] = 10.0

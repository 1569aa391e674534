"""The engine's load, for routers: `GET /load` as in vLLM, `/get_load` and `/v1/loads` as in SGLang."""

from __future__ import annotations

import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from aengine.http.endpoint import json_response
from aengine.http.operation import ENGINE_ERRORS, Operation
from aengine.http.state import ServerState
from aengine.types import Stats

_UNCACHED = {"Cache-Control": "no-store"}


class ServerLoad(msgspec.Struct, frozen=True):
    """`GET /load`."""

    server_load: int  # requests, running or waiting


class WorkerLoad(msgspec.Struct, frozen=True):
    """An entry of `GET /get_load`."""

    num_reqs: int  # running or waiting
    num_waiting_reqs: int
    num_tokens: int  # tokens in the KV cache that running requests hold
    dp_rank: int = 0


class RankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `GET /v1/loads`."""

    dp_rank: int = 0
    timestamp: float  # unix seconds
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float  # the share of the tokens that running requests hold
    cache_hit_rate: float


class LoadList(msgspec.Struct, frozen=True):
    """`GET /v1/loads`."""

    timestamp: float
    loads: list[RankLoad]
    dp_rank_count: int = 1


class Load:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def server_load(self, request: Request) -> Response:
        """Return the number of requests, running or waiting."""
        stats = self._stats()
        return json_response(ServerLoad(stats.running + stats.waiting), headers=_UNCACHED)

    async def get_load(self, request: Request) -> Response:
        """Return a list with one entry for the one engine."""
        stats = self._stats()
        load = WorkerLoad(stats.running + stats.waiting, stats.waiting, stats.pages_used * stats.page_size)
        return json_response([load], headers=_UNCACHED)

    async def loads(self, request: Request) -> Response:
        """Return the same in SGLang's newer format."""
        stats, now = self._stats(), time.time()
        load = RankLoad(
            timestamp=now,
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=stats.pages_used * stats.page_size,
            max_total_num_tokens=stats.pages_total * stats.page_size,
            token_usage=round(stats.kv_usage, 4),
            cache_hit_rate=round(stats.hit_rate, 4),
        )
        return json_response(LoadList(now, [load]), headers=_UNCACHED)

    def _stats(self) -> Stats:
        return self._state.require_engine().stats()


def operations(state: ServerState) -> list[Operation]:
    load = Load(state)
    return [
        Operation(
            "GET",
            "/load",
            load.server_load,
            "How many requests there are, as in vLLM.",
            answer=ServerLoad,
            refusals=ENGINE_ERRORS,
        ),
        Operation(
            "GET",
            "/get_load",
            load.get_load,
            "The same with tokens, as in SGLang.",
            answer=list[WorkerLoad],
            refusals=ENGINE_ERRORS,
        ),
        Operation(
            "GET",
            "/v1/loads",
            load.loads,
            "The same in SGLang's newer format.",
            answer=LoadList,
            refusals=ENGINE_ERRORS,
        ),
    ]

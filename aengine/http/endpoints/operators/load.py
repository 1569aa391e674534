"""How busy the engine is, for routers outside: `GET /load` as in vLLM, `/get_load` and `/v1/loads` as in SGLang."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from aengine.http.bodies.responses import LoadList, RankLoad, ServerLoad, WorkerLoad
from aengine.http.endpoints.base import json_response
from aengine.http.state import ServerState
from aengine.types import Stats

_UNCACHED = {"Cache-Control": "no-store"}


class Load:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def server_load(self, request: Request) -> Response:
        """The number of requests, running or waiting."""
        stats = self._stats()
        return json_response(ServerLoad(stats.running + stats.waiting), headers=_UNCACHED)

    async def get_load(self, request: Request) -> Response:
        """A list with one entry, for the one engine."""
        stats = self._stats()
        load = WorkerLoad(stats.running + stats.waiting, stats.waiting, stats.pages_used * stats.page_size)
        return json_response([load], headers=_UNCACHED)

    async def loads(self, request: Request) -> Response:
        """The same in SGLang's newer words."""
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

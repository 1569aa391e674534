"""An engine as a Ray Serve deployment. It runs the application of one server, which the ingress calls."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from ray import serve
from starlette.types import Message

from aengine.app import Application
from aengine.config import EngineConfig, ServerConfig
from aengine.errors import EngineFailedError
from aengine.ray_serve.call import Call, Head
from aengine.ray_serve.keyed_engine import CallPrompt, KeyedEngine, measure_speed
from aengine.ray_serve.line import LineOut
from aengine.ray_serve.routing.cached_keys import Changes
from aengine.ray_serve.routing.load import Report
from aengine.ray_serve.routing.prompt import Prompt


class Accepted(msgspec.Struct, frozen=True):
    """The first item from a replica that accepted a request: its name, and the changes of its cache."""

    replica: str
    changes: Changes


class EngineReplica:
    """One engine. Ray sends no requests until `__init__` has returned, that is until the model is loaded."""

    # Ray awaits `__init__`.
    async def __init__(self, engine: dict[str, Any], server: dict[str, Any]) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        self._name = context.replica_tag
        engine |= {name: _own_port(engine[name], context.rank.rank) for name in ("kv_events", "kv_events_replay")}
        self._engine = KeyedEngine(config=msgspec.convert(engine, EngineConfig))
        self._app = Application(self._engine.config, msgspec.convert(server, ServerConfig), lambda _: self._engine)
        self._calls: Counter[str] = Counter()  # running calls, by router
        self._lines: dict[str, LineOut] = {}  # by router
        self._closing = asyncio.Event()
        self._started = asyncio.Event()
        self._life = asyncio.create_task(self._app({"type": "lifespan"}, self._lifespan_receive, self._lifespan_send))
        settled = asyncio.create_task(self._app.settled.wait())
        await asyncio.wait([settled, self._life], return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()
        self._raise_failure()
        self._speed = await measure_speed(self._engine)

    async def serve_http(
        self, scope: dict[str, Any], body: bytes, prompt: Prompt, router: str, number: int
    ) -> AsyncGenerator[Accepted | Head | bytes, None]:
        """Answer a request: first the changes of the cache since this router's last call, then head and body.

        The rest of a stream goes by a line if the router has opened one. number: identifies the call on the line.
        """
        call_prompt = CallPrompt(prompt)
        pieces = Call(self._app, scope, body, call_prompt).pieces(lambda: self._engine.note(call_prompt))
        self._calls[router] += 1
        line: LineOut | None = None
        try:
            yield Accepted(self._name, self._engine.cached.changes(router))
            async for piece in pieces:
                if line is not None and not isinstance(piece, Head):
                    await line.put(number, piece)
                elif isinstance(piece, Head) and piece.is_stream and (line := self._lines.get(router)) is not None:
                    line.begin()
                    yield msgspec.structs.replace(piece, line=line.number)
                else:
                    yield piece
        finally:
            self._calls[router] -= 1
            if not self._calls[router]:
                del self._calls[router]
            if line is not None:
                line.end(number)
            await pieces.aclose()

    async def line(self, router: str, number: int) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of this router's streams from now on, until it has had none for a while."""
        line = LineOut(number)
        self._lines[router] = line
        batches = line.batches()
        try:
            async for batch in batches:
                yield batch
        finally:
            if self._lines.get(router) is line:
                del self._lines[router]
            await batches.aclose()

    async def serve_whole(self, scope: dict[str, Any], body: bytes) -> tuple[str, Head]:
        """Return this replica's name, and its whole answer to a request that goes to all replicas."""
        head, parts = None, []
        async for piece in Call(self._app, scope, body, CallPrompt(Prompt())).pieces(lambda: None):
            if isinstance(piece, Head):
                head = piece
                parts.append(piece.body)
            else:
                parts.append(piece)
        if head is None:
            raise EngineFailedError("the application gave no answer")
        return self._name, msgspec.structs.replace(head, body=b"".join(parts))

    def record_routing_stats(self) -> dict[str, Any]:
        """Return the report for routers. Ray's controller asks once a second and passes it on."""
        stats = self._engine.stats()
        requests = stats.running + stats.waiting
        report = Report(requests, stats.waiting, stats.kv_usage, self._speed, dict(self._calls))
        built: dict[str, Any] = msgspec.to_builtins(report)
        return built

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics for the autoscaler."""
        stats = self._engine.stats()
        return {"requests": float(stats.running + stats.waiting), "kv_usage": stats.kv_usage}

    def check_health(self) -> None:
        """Raise if the engine has failed or ended. Ray then replaces this replica."""
        self._raise_failure()

    async def __del__(self) -> None:
        if hasattr(self, "_life"):
            self._closing.set()
            await asyncio.wait([self._life])

    def _raise_failure(self) -> None:
        if self._app.failure is not None:
            raise EngineFailedError(f"the engine failed: {self._app.failure}")
        if self._life.done():
            raise EngineFailedError("the engine has ended")

    async def _lifespan_receive(self) -> Message:
        if not self._started.is_set():
            self._started.set()
            return {"type": "lifespan.startup"}
        await self._closing.wait()
        return {"type": "lifespan.shutdown"}

    async def _lifespan_send(self, message: Message) -> None:
        """Ignore the message: `settled` and `failure` of the application tell the outcome."""


def _own_port(address: str | None, rank: int) -> str | None:
    """Return the address with the rank added to its port, because replicas may share a host."""
    if address is None or (port := re.search(r":(\d+)$", address)) is None:
        return address
    return f"{address[: port.start()]}:{int(port[1]) + rank}"

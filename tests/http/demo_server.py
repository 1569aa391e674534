"""The demo model in a real hypercorn: in the test's own loop, or in a thread for blocking clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.serving import hosting


class DemoEngine(aengine.Engine):
    """A small engine with an event for its start. knobs: of `EngineConfig`."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**({"device": "cpu", "max_num_seqs": 32, "kv_cache_gib": 0.1, "progress": False} | knobs))
        self.entered = asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.entered.set()
        return self


@asynccontextmanager
async def hosted_demo(engine: DemoEngine | None = None, **knobs: Any) -> AsyncIterator[str]:
    """The address of a server with these `ServerConfig` knobs, when it is ready."""
    made = engine or DemoEngine()
    app = create_app(EngineConfig(), ServerConfig(**knobs), engine_factory=lambda config: made)
    async with hosting(app) as (port, _):
        async with asyncio.timeout(60):
            await made.entered.wait()
        yield f"http://127.0.0.1:{port}"


@contextmanager
def demo_server(engine_knobs: dict[str, Any] | None = None, **knobs: Any) -> Iterator[str]:
    """`hosted_demo` in a thread with its own loop."""
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            async with hosted_demo(DemoEngine(**(engine_knobs or {})), **knobs) as url:
                ready.set_result(url)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
            raise

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield ready.result(60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()

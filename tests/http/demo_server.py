"""hypercorn and the demo model in a thread with a loop of its own, for clients that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from hypercorn.asyncio import serve
from hypercorn.config import Config

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.serving import listen


@contextmanager
def demo_server(
    max_model_len: int | None = None, load_format: Literal["auto", "dummy"] = "auto", **knobs: Any
) -> Iterator[str]:
    """Serve the demo model with these `ServerConfig` knobs; gives the URL once it is ready.

    `dummy`: the same model with random weights.
    """
    config = EngineConfig(
        device="cpu",
        max_num_seqs=32,
        kv_cache_gib=0.1,
        progress=False,
        max_model_len=max_model_len,
        load_format=load_format,
    )
    ready: Future[str] = Future()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(
        target=lambda: loop.run_until_complete(_serve(config, ServerConfig(**knobs), ready, stop))
    )
    thread.start()
    try:
        yield ready.result(60)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


async def _serve(engine_config: EngineConfig, server: ServerConfig, ready: Future[str], stop: asyncio.Event) -> None:
    file, port = listen()

    @asynccontextmanager
    async def engine(config: EngineConfig) -> AsyncIterator[aengine.Engine]:
        async with aengine.Engine(config=config) as made:
            # Known to the server only once this has yielded, which happens before anyone can act on the result.
            asyncio.get_running_loop().call_soon(ready.set_result, f"http://127.0.0.1:{port}")
            yield made

    app = create_app(engine_config, server, engine_factory=engine)
    config = Config()
    config.bind = [f"fd://{file}"]
    config.graceful_timeout = 0.1
    config.errorlog = None
    await serve(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]

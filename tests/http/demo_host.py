"""The demo model behind a real hypercorn, inside the test's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.serving import hosting


class DemoEngine(aengine.Engine):
    """Says when it has been entered."""

    def __init__(self, load_format: Literal["auto", "dummy"]) -> None:
        super().__init__(device="cpu", max_num_seqs=8, kv_cache_gib=0.1, progress=False, load_format=load_format)
        self.entered = asyncio.Event()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.entered.set()
        return self


@asynccontextmanager
async def hosted_demo(load_format: Literal["auto", "dummy"] = "auto", **knobs: Any) -> AsyncIterator[str]:
    """The address of a server with these `ServerConfig` knobs. `dummy`: the same model with random weights."""
    engine = DemoEngine(load_format)
    app = create_app(EngineConfig(), ServerConfig(**knobs), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _):
        async with asyncio.timeout(30):
            await engine.entered.wait()
        yield f"http://127.0.0.1:{port}"

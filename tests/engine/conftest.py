"""One demo engine for the tests that only use it, and a way to make special ones."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

import aengine


async def idle(engine: aengine.Engine) -> None:
    """Wait until nothing runs or waits; then every page and row is accounted for."""
    with anyio.fail_after(60):
        while engine.stats().running or engine.stats().waiting:  # noqa: ASYNC110 - the engine has no such event
            await anyio.sleep(0.001)
    engine.check_integrity()


@pytest.fixture
async def engine() -> AsyncIterator[aengine.Engine]:
    """The demo model on the CPU; at the end nothing runs and every page is accounted for."""
    async with aengine.Engine(device="cpu", max_num_seqs=32, kv_cache_gib=0.1, progress=False) as engine:
        yield engine
        await idle(engine)

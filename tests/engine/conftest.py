"""One demo engine for the tests that only use it, and a way to make special ones."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import aengine


@pytest.fixture
async def engine() -> AsyncIterator[aengine.Engine]:
    """The demo model on the CPU; at the end nothing runs and every page is accounted for."""
    async with aengine.Engine(device="cpu", max_num_seqs=32, kv_cache_gib=0.1, progress=False) as engine:
        yield engine
        assert engine.stats().running == engine.stats().waiting == 0
        engine.check_integrity()

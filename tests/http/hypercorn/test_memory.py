"""Memory is returned when most of many connections have closed, once for each peak."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from aengine.http.hypercorn import memory
from aengine.http.hypercorn.memory import MIN_PEAK, MemoryReleaser, return_memory

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_DELAY", 0.0)
    monkeypatch.setattr(memory, "_MIN_INTERVAL", 0.0)


async def wave(of: MemoryReleaser, most: int, left: int = 0) -> None:
    """Open connections one by one until `most` are open, and close them until `left` are open."""
    for count in range(1, most + 1):
        of.grew(count)
    for count in range(most - 1, left - 1, -1):
        of.shrank(count)
    await asyncio.sleep(0.01)  # the loop's next turns


async def test_once_after_each_crowd() -> None:
    given: list[None] = []
    of = MemoryReleaser(lambda: given.append(None))
    await wave(of, MIN_PEAK - 1)
    assert len(given) == 0
    await wave(of, MIN_PEAK, left=MIN_PEAK // 10 + 1)
    assert len(given) == 0  # too many are still open
    await wave(of, MIN_PEAK)
    assert len(given) == 1
    await wave(of, 50)
    assert len(given) == 1
    await wave(of, 3 * MIN_PEAK, left=20)
    assert len(given) == 2


async def test_peaks_that_follow_each_other_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MIN_INTERVAL", 0.2)
    given: list[float] = []
    loop, reported = asyncio.get_running_loop(), asyncio.Event()

    def release() -> None:
        given.append(loop.time())
        if len(given) == 2:
            reported.set()

    of = MemoryReleaser(release)
    for _ in range(5):
        await wave(of, MIN_PEAK)
        assert len(given) == 1 or given[1] - given[0] >= 0.19
    await asyncio.wait_for(reported.wait(), 30)
    assert given[1] - given[0] >= 0.19


def test_what_refers_to_itself_is_gone() -> None:
    class Closed:
        def __init__(self) -> None:
            self.me = self

    gc.disable()
    try:
        left = weakref.ref(Closed())
        assert left() is not None
        return_memory()
        assert left() is None
    finally:
        gc.enable()

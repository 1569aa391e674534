"""Memory is returned when most of many connections have closed, once for each crowd."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from aengine.http.hypercorn import crowd
from aengine.http.hypercorn.crowd import CROWD, Crowd, return_memory

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "_SECONDS", 0.0)
    monkeypatch.setattr(crowd, "_APART", 0.0)


async def wave(of: Crowd, most: int, left: int = 0) -> None:
    """Open connections one by one until `most` are open, and close them until `left` are open."""
    for count in range(1, most + 1):
        of.grew(count)
    for count in range(most - 1, left - 1, -1):
        of.shrank(count)
    await asyncio.sleep(0.01)  # the loop's next turns


async def test_once_after_each_crowd() -> None:
    given: list[None] = []
    of = Crowd(lambda: given.append(None))
    await wave(of, CROWD - 1)
    assert len(given) == 0
    await wave(of, CROWD, left=CROWD // 10 + 1)
    assert len(given) == 0  # too many are still open
    await wave(of, CROWD)
    assert len(given) == 1
    await wave(of, 50)
    assert len(given) == 1
    await wave(of, 3 * CROWD, left=20)
    assert len(given) == 2


async def test_crowds_that_follow_each_other_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowd, "_APART", 0.2)
    given: list[float] = []
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def release() -> None:
        given.append(loop.time())
        if len(given) == 2:
            told.set()

    of = Crowd(release)
    for _ in range(5):
        await wave(of, CROWD)
        assert len(given) == 1 or given[1] - given[0] >= 0.19
    await asyncio.wait_for(told.wait(), 30)
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

"""Chats that exceed the pool, on an engine with host memory below it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

import aengine
from aengine.types import Completion
from tests.engine.conftest import idle

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
PAGE = 16
CHATS = 9
TOKENS = 192  # of each chat; together three times the size of the pool
KNOBS: dict[str, Any] = {
    "num_pages": CHATS * (TOKENS // PAGE + 2) // 3,
    "max_num_seqs": 4,
    "host_cache_gib": 0.05,
    "progress": False,
}


def chat(number: int, tokens: int = TOKENS) -> list[int]:
    """Return the beginning of a chat. No two begin alike."""
    return [300 + (number * 131 + place * 7) % 3000 for place in range(tokens)]


@asynccontextmanager
async def engine_with(**knobs: Any) -> AsyncIterator[aengine.Engine]:
    """Serve the demo model in float32. At the end, check that every page is accounted for."""
    async with aengine.Engine(**{"device": "cpu", "dtype": "float32", **KNOBS, **knobs}) as engine:
        bring_whatever_there_is(engine)
        yield engine
        await idle(engine)


def bring_whatever_there_is(engine: aengine.Engine) -> None:
    """Always prefer copying to computing, however fast this machine is."""
    loading = engine._ready().scheduler.loading
    if loading is not None:
        loading.tiers.speeds.worth = lambda *_: True  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.005)


async def all_copied(engine: aengine.Engine) -> None:
    """Wait until nothing is left to copy or to write."""
    await idle(engine)
    loading = engine._ready().scheduler.loading
    assert loading is not None
    tiers = loading.tiers
    await until(lambda: not tiers.store_due and tiers._store is None and not tiers._unwritten)


async def ask(engine: aengine.Engine, prompt: list[int], **more: Any) -> Completion:
    return await engine.complete(prompt, **(GREEDY | more))


async def talk(engine: aengine.Engine, chats: list[list[int]]) -> list[Completion]:
    """Run one turn of each chat, one after the other."""
    turns = []
    for history in chats:
        turn = await ask(engine, history)
        history += [*turn.token_ids, 17, 18]
        turns.append(turn)
    return turns

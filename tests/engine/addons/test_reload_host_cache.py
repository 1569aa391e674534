"""Copies of pages while weights change: pages are never used with other weights than their own."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.runtime.weights import Weights
from tests.engine.addons.chats import CHATS, all_copied, chat, engine_with, talk
from tests.engine.checkpoints import other_demo

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model with other weights."""
    return other_demo(tmp_path_factory.mktemp("reload") / "other")


async def turns(engine: aengine.Engine) -> tuple[list[tuple[int, ...]], int]:
    """Return the ids of the first turn of each chat, and the number of cached tokens."""
    completions = await talk(engine, [chat(number) for number in range(CHATS)])
    return [one.token_ids for one in completions], sum(one.usage.cached_tokens for one in completions)


@pytest.mark.slow
@pytest.mark.parametrize("given_up", [False, True])
async def test_files_of_reloaded_weights_are_found_for_these_alone(
    given_up: bool, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """given_up: the call is cancelled while the weights are read; reading goes on to its end."""
    reading, go = threading.Event(), threading.Event()
    reload = Weights.reload

    def barred(weights: Weights, checkpoint: Any) -> None:
        reading.set()
        assert go.wait(30)
        reload(weights, checkpoint)

    monkeypatch.setattr(Weights, "reload", barred)
    knobs: dict[str, Any] = {"disk_cache_dir": str(tmp_path)}
    async with engine_with(**knobs) as engine:
        own, _ = await turns(engine)
        reloading = asyncio.create_task(engine.reload(other))
        await asyncio.to_thread(reading.wait, 30)
        if given_up:
            reloading.cancel()
        go.set()
        await asyncio.gather(reloading, return_exceptions=True)
        assert reloading.cancelled() == given_up
        others, found = await turns(engine)
        assert (found, others != own) == (0, True)
        await all_copied(engine)
    async with engine_with(**knobs) as engine:
        assert await turns(engine) == (own, 0)
        await all_copied(engine)
    async with engine_with(model=str(other), **knobs) as engine:
        ids, found = await turns(engine)
        assert ids == others
        assert found > 0

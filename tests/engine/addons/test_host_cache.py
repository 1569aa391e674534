"""Chats whose KV was evicted: their next turns find it in host memory."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import aengine
from tests.engine.addons.chats import (
    CHATS,
    KNOBS,
    PAGE,
    TOKENS,
    all_copied,
    ask,
    bring_whatever_there_is,
    chat,
    engine_with,
    talk,
)

pytestmark = pytest.mark.anyio

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on(device: str, gpus: int = 1) -> dict[str, Any]:
    """Return knobs. A GPU machine may have no weights of the demo model."""
    if device == "cpu":
        return {"device": device}
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"there are no {gpus} GPUs")
    return {"device": device, "load_format": "dummy"}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_returning_chats_find_their_tokens_in_host_memory(device: str) -> None:
    chats, alone = ([chat(number) for number in range(CHATS)] for _ in range(2))
    async with engine_with(**on(device)) as engine:
        first = await talk(engine, chats)
        second = await talk(engine, chats)
        stats = engine.stats()
    async with engine_with(**on(device), host_cache_gib=0, prefix_cache=False, num_pages=200) as engine:
        assert [turn.token_ids for turn in first] == [turn.token_ids for turn in await talk(engine, alone)]
        assert [turn.token_ids for turn in second] == [turn.token_ids for turn in await talk(engine, alone)]

    assert [turn.usage.cached_tokens for turn in first] == [0] * CHATS
    assert all(turn.usage.cached_tokens >= TOKENS - PAGE for turn in second)
    assert stats.cached_tokens == sum(turn.usage.cached_tokens for turn in second)
    assert stats.cached_host_tokens > 0.8 * stats.cached_tokens
    assert stats.cached_disk_tokens == 0
    assert stats.host_pages <= stats.host_pages_total
    assert stats.host_loads * PAGE >= stats.cached_host_tokens


@pytest.mark.slow
async def test_many_at_once() -> None:
    """Loads run while other requests step. The outputs are those of an engine without a cache."""
    prompts = [chat(number) for number in range(CHATS)]
    async with engine_with(host_cache_gib=0, prefix_cache=False) as engine:
        wanted = [turn.token_ids for turn in await asyncio.gather(*(ask(engine, one, n=2) for one in prompts))]
    async with engine_with() as engine:
        for _ in range(3):
            turns = await asyncio.gather(*(ask(engine, one, n=2) for one in prompts))
            assert [turn.token_ids for turn in turns] == wanted
        assert engine.stats().cached_host_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
async def test_several_ranks_keep_a_shard_each(device: str, tmp_path: Path) -> None:
    chats = [chat(number) for number in range(CHATS)]
    knobs = {**on(device, gpus=2), "tensor_parallel_size": 2, "disk_cache_dir": str(tmp_path)}
    async with engine_with(**knobs) as engine:
        first = await talk(engine, [list(one) for one in chats])
        again = await talk(engine, [list(one) for one in chats])
        stats = engine.stats()
        await all_copied(engine)
    assert [turn.token_ids for turn in first] == [turn.token_ids for turn in again]
    assert stats.cached_host_tokens > 0
    async with engine_with(**knobs) as engine:
        assert [turn.token_ids for turn in await talk(engine, chats)] == [turn.token_ids for turn in first]
        assert engine.stats().cached_disk_tokens > 0


async def test_flushing_drops_pages_in_host_memory() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        await talk(engine, [list(one) for one in chats])
        assert engine.stats().host_pages > 0
        engine.flush_cache()
        assert engine.stats().host_pages == 0
        turns = await talk(engine, chats[:3])
    assert [turn.usage.cached_tokens for turn in turns] == [0, 0, 0]


async def test_salts_are_kept_apart() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        for one in chats:
            await ask(engine, one, cache_salt="a")
        other = await ask(engine, chats[0], cache_salt="b")
        same = await ask(engine, chats[0], cache_salt="a")
    assert other.usage.cached_tokens == 0
    assert same.usage.cached_tokens > 0
    assert same.token_ids == other.token_ids


class Gate:
    """Holds copies to the device until a test opens it, or makes them fail."""

    def __init__(self, engine: aengine.Engine) -> None:
        self.began = asyncio.Event()
        self.open = asyncio.Event()
        self.error: Exception | None = None
        copies = engine._ready().runtime.copies
        assert copies is not None
        self._copy = copies.to_device
        copies.to_device = self  # type: ignore[assignment]

    async def __call__(self, slots: list[int], pages: list[int]) -> None:
        self.began.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        await self._copy(slots, pages)


async def test_others_go_on_while_one_waits_for_its_pages() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        await talk(engine, [list(one) for one in chats])
        gate = Gate(engine)
        returning = asyncio.create_task(ask(engine, chats[0]))
        await gate.began.wait()
        fresh = await ask(engine, chat(100, 40))
        assert len(fresh.token_ids) == 6
        assert not returning.done()
        engine.check_integrity()
        gate.open.set()
        assert (await returning).usage.cached_tokens > 0


@pytest.mark.slow
async def test_an_abort_while_pages_are_on_their_way() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        await talk(engine, [list(one) for one in chats])
        gate = Gate(engine)
        returning = asyncio.create_task(ask(engine, chats[0]))
        await gate.began.wait()
        returning.cancel()
        await asyncio.gather(returning, return_exceptions=True)
        assert engine.stats().waiting == 0
        engine.check_integrity()
        gate.open.set()
        again = await ask(engine, chats[0])  # its pages were loaded nevertheless
        assert again.usage.cached_tokens > 0


@pytest.mark.slow
async def test_a_flush_while_pages_are_on_their_way() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        first = await talk(engine, [list(one) for one in chats])
        gate = Gate(engine)
        returning = asyncio.create_task(ask(engine, chats[0]))
        await gate.began.wait()
        engine.flush_cache()
        gate.open.set()
        turn = await returning
    assert turn.usage.cached_tokens == 0
    assert turn.token_ids == first[0].token_ids


async def test_a_failing_copy_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with() as engine:
        first = await talk(engine, [list(one) for one in chats])
        gate = Gate(engine)
        gate.error = RuntimeError("the bus is gone")
        gate.open.set()
        turn = await ask(engine, chats[0])
    assert turn.token_ids == first[0].token_ids
    assert turn.usage.cached_tokens == 0
    assert "could not be copied from host memory: the bus is gone" in caplog.text


@pytest.mark.slow
async def test_leaving_the_engine_while_pages_are_on_their_way() -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(aengine.Engine(device="cpu", **KNOBS))
        bring_whatever_there_is(engine)
        await talk(engine, [list(one) for one in chats])
        gate = Gate(engine)
        returning = asyncio.create_task(ask(engine, chats[0]))
        await gate.began.wait()
        asyncio.get_running_loop().call_later(0.05, gate.open.set)
    with pytest.raises(aengine.errors.EngineClosedError):
        await returning

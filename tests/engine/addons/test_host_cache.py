"""Chats whose KV was evicted: their next turns find it in host memory, and after a restart on the disk."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
import torch

import aengine
from aengine.cache.tiers.disk import DiskPages
from aengine.errors import ConfigError
from aengine.model.loading.hub import DEMO
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.model.checkpoints import write_checkpoint

pytestmark = pytest.mark.anyio

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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


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


def files(folder: Path) -> list[Path]:
    """Of pages."""
    return sorted(folder.glob("*/*.kv"))


# ---- the disk ---------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_restart_is_warm(tmp_path: Path) -> None:
    chats = [chat(number) for number in range(CHATS)]
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        first = await talk(engine, [list(one) for one in chats])
        await all_copied(engine)
        assert engine.stats().disk_bytes > 0
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        again = await talk(engine, chats)
        stats = engine.stats()
    assert [turn.token_ids for turn in again] == [turn.token_ids for turn in first]
    assert all(turn.usage.cached_tokens >= TOKENS - PAGE for turn in again)
    assert stats.cached_disk_tokens == sum(turn.usage.cached_tokens for turn in again)
    assert stats.disk_loads * PAGE == stats.cached_disk_tokens


async def test_another_model_finds_nothing(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
    async with engine_with(disk_cache_dir=str(tmp_path), load_format="dummy", seed=1) as engine:
        assert (await ask(engine, chat(0))).usage.cached_tokens == 0


async def test_the_weights_tell_whose_pages_they_are_not_the_times_of_their_files(tmp_path: Path) -> None:
    """A tensor differs far inside a file of the same size and time, as after tar or rsync."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    knobs = {"model": str(folder), "disk_cache_dir": str(tmp_path / "pages")}
    async with engine_with(**knobs) as engine:
        own = await ask(engine, chat(0))
        await all_copied(engine)
    file = folder / "model.safetensors"
    os.utime(file, ns=(10**18, 10**18))
    async with engine_with(**knobs) as engine:
        assert (await ask(engine, chat(0))).usage.cached_tokens > 0
    with file.open("r+b") as weights:
        weights.seek(2**21)
        weights.write(bytes(file.stat().st_size // 2))
    os.utime(file, ns=(10**18, 10**18))
    async with engine_with(**knobs) as engine:
        other = await ask(engine, chat(0))
    assert (other.usage.cached_tokens, other.token_ids != own.token_ids) == (0, True)


async def test_keys_that_are_rotated_otherwise_are_not_found(tmp_path: Path) -> None:
    """By longrope, whose factors depend on whether a request may leave the trained context of 128 tokens."""
    folder = tmp_path / "phi3"
    write_checkpoint("phi3-beyond-the-trained-context", folder, vocab_size=4096, original_max_position_embeddings=128)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    knobs = {"model": str(folder), "disk_cache_dir": str(tmp_path / "pages")}
    async with engine_with(**knobs, max_model_len=256) as engine:
        far = await ask(engine, chat(0, 100), max_tokens=100)
        await all_copied(engine)
        near = await ask(engine, chat(0, 100))
        await all_copied(engine)
    assert (far.usage.cached_tokens, near.usage.cached_tokens) == (0, 0)
    async with engine_with(**knobs, max_model_len=120) as engine:  # all requests are near
        again = await ask(engine, chat(0, 100))
    assert again.token_ids == near.token_ids
    assert again.usage.cached_tokens == 96
    async with engine_with(**knobs, max_model_len=256) as engine:
        again = await ask(engine, chat(0, 100), max_tokens=100)
    assert again.token_ids == far.token_ids
    assert again.usage.cached_tokens == 96


async def test_a_damaged_file_is_computed_anew_and_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        first = await ask(engine, chat(0))
        await all_copied(engine)
    (tmp_path / "notes.txt").write_text("not a page")
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
            again = await ask(engine, chat(0))
    assert again.token_ids == first.token_ids
    assert again.usage.cached_tokens == 0
    lines = [record.getMessage() for record in caplog.records if "disk_cache_dir" in record.getMessage()]
    assert len(lines) == 2
    assert "1 files in" in lines[0]
    assert lines[1].endswith("is damaged; its page is computed again")


async def test_a_full_disk_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiskPages, "write", Mock(side_effect=OSError(28, "No space left on device")))
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
        assert DiskPages.write.call_count > 5  # type: ignore[attr-defined]
    assert caplog.text.count("a page could not be written: [Errno 28] No space left on device") == 1


async def test_flushing_drops_the_files(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path)) as engine:
        await ask(engine, chat(0))
        await all_copied(engine)
        assert files(tmp_path)
        engine.flush_cache()
        await until(lambda: not files(tmp_path))
        assert engine.stats().disk_bytes == 0


async def test_files_are_bounded(tmp_path: Path) -> None:
    async with engine_with(disk_cache_dir=str(tmp_path), disk_cache_gib=0.002) as engine:
        await talk(engine, [chat(number) for number in range(4)])
        await all_copied(engine)
        size = engine.stats().disk_bytes
    on_disk = sum(path.stat().st_size for path in files(tmp_path))
    assert 0 < size <= 0.002 * 2**30
    assert on_disk == size


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"prefix_cache": False}, "host_cache_gib: without the prefix cache no pages are kept"),
        ({"host_cache_gib": 0, "disk_cache_dir": "/tmp/nowhere"}, "disk_cache_dir: .* set host_cache_gib"),
        ({"host_cache_gib": 2.0**19}, "host_cache_gib: .* leave too little"),
        ({"host_cache_gib": 1e-9}, "host_cache_gib: .* raise it"),
        ({"disk_cache_dir": "/proc/version"}, "disk_cache_dir: /proc/version"),
        ({"disk_cache_dir": "/tmp"}, "disk_cache_dir: /tmp: every user may write into the folder"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(knobs: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        async with engine_with(**knobs):
            raise AssertionError("it should not have started")

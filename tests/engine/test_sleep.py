"""Sleep and wake: running requests end first, new ones are refused, and afterwards only the cache is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aengine
from aengine.config import EngineConfig
from aengine.errors import ConfigError, EngineClosedError, EngineNotReadyError, InvalidRequestError
from aengine.model.config import ModelConfig
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from tests.engine.adapters import Written
from tests.engine.conftest import idle

pytestmark = pytest.mark.anyio

KNOBS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "kv_cache_gib": 0.1, "progress": False}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
ENDLESS: dict[str, Any] = GREEDY | {"max_tokens": 1000}
PROMPT = [300 + number * 7 % 2000 for number in range(50)]


class Memory:
    """Device memory that a test can watch and block."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bar = threading.Event()
        self.bar.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def sleep(self) -> None:
        self._do("sleep")

    def wake(self) -> None:
        self._do("wake")

    def close(self) -> None:
        self.calls.append("close")

    def _do(self, name: str) -> None:
        self.entered.set()
        assert self.bar.wait(30)
        if self.error is not None:
            raise self.error
        self.calls.append(name)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def made(memory: Memory) -> aengine.Engine:
    """An engine of the demo model with that memory."""

    def start(config: EngineConfig, folder: Path, model: ModelConfig, wait: Callable[[], object]) -> Runtime:
        made = start_runtime(config, folder, model, wait)
        return replace(made, memory=memory)

    return aengine.Engine(config=EngineConfig(**KNOBS, sleep_mode=True), start=start)


@pytest.fixture
async def engine(memory: Memory) -> AsyncIterator[aengine.Engine]:
    async with made(memory) as engine:
        yield engine
        if not engine.is_sleeping:
            await idle(engine)
    assert memory.calls[-1:] == ["close"]


async def entered(memory: Memory) -> None:
    """Wait until the change is running in its thread."""
    assert await asyncio.to_thread(memory.entered.wait, 30)
    memory.entered.clear()


async def asleep(engine: aengine.Engine) -> None:
    """Wait until new requests are refused, even if running ones have not ended."""
    with anyio.fail_after(30):
        while not engine.refusal:  # noqa: ASYNC110 - the engine has no such event
            await anyio.sleep(0.001)


async def test_the_same_ids_come_after_it_from_an_empty_cache(engine: aengine.Engine, memory: Memory) -> None:
    before = await engine.complete(PROMPT, **GREEDY)
    again = await engine.complete(PROMPT, **GREEDY)
    assert again.usage.cached_tokens
    await engine.sleep()
    assert engine.is_sleeping
    assert engine.stats().pages_cached == 0
    await engine.wake_up()
    assert not engine.is_sleeping
    after = await engine.complete(PROMPT, **GREEDY)
    assert (after.token_ids, after.usage.cached_tokens) == (before.token_ids, 0)
    assert memory.calls == ["sleep", "wake"]


async def test_requests_are_refused_while_it_sleeps(engine: aengine.Engine) -> None:
    await engine.sleep()
    for call in (
        lambda: engine.complete(PROMPT, **GREEDY),
        lambda: engine.chat([{"role": "user", "content": "hi"}]),
        lambda: engine.embed("hello"),
        lambda: engine.reload(),
    ):
        with pytest.raises(EngineNotReadyError, match="wake_up"):
            await call()
    assert engine.refusal
    await engine.wake_up()
    assert not engine.refusal
    await engine.complete(PROMPT, **GREEDY)


async def test_what_runs_and_what_waits_ends_first(engine: aengine.Engine, memory: Memory) -> None:
    running = [asyncio.create_task(engine.complete([400 + i], **GREEDY | {"max_tokens": 60})) for i in range(12)]
    while engine.stats().waiting < 4:
        await anyio.lowlevel.checkpoint()
    sleeping = asyncio.create_task(engine.sleep())
    await asleep(engine)
    with pytest.raises(EngineNotReadyError):
        await engine.complete(PROMPT, **GREEDY)
    assert memory.calls == []
    done = await asyncio.gather(*running)
    assert all(len(one.token_ids) == 60 for one in done)
    await sleeping
    assert memory.calls == ["sleep"]
    await engine.wake_up()


async def test_or_is_aborted_at_once(engine: aengine.Engine) -> None:
    stream = await engine.submit(PROMPT, **ENDLESS)
    await stream.take()
    await engine.sleep(mode="abort")
    fragments = await stream.take()
    assert fragments[-1].finish_reason == "abort"
    assert engine.stats().generated_tokens < 900
    await engine.wake_up()


async def test_no_step_is_in_flight_while_memory_goes(engine: aengine.Engine, memory: Memory) -> None:
    loop = engine._service.loop
    assert loop is not None
    await engine.complete(PROMPT, **GREEDY)
    memory.bar.clear()
    sleeping = asyncio.create_task(engine.sleep())
    await entered(memory)
    steps = engine.stats().steps
    loop.wake()
    await asyncio.sleep(0)
    assert engine.stats().steps == steps
    assert loop._idle.is_set()
    memory.bar.set()
    await sleeping
    await engine.wake_up()


async def test_given_up_while_it_waits_nothing_has_happened(engine: aengine.Engine, memory: Memory) -> None:
    stream = await engine.submit(PROMPT, **ENDLESS)
    await stream.take()
    sleeping = asyncio.create_task(engine.sleep())
    await asleep(engine)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert not engine.refusal
    assert not engine.is_sleeping
    assert memory.calls == []
    await engine.complete(PROMPT, **GREEDY)
    stream.abort()


async def test_given_up_later_it_still_falls_asleep(engine: aengine.Engine, memory: Memory) -> None:
    memory.bar.clear()
    sleeping = asyncio.create_task(engine.sleep())
    await entered(memory)
    for _ in range(3):
        sleeping.cancel()
        await asyncio.sleep(0)
    assert not sleeping.done()
    memory.bar.set()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    assert engine.is_sleeping
    await engine.wake_up()
    await engine.complete(PROMPT, **GREEDY)


async def test_calls_at_once_and_calls_in_vain(engine: aengine.Engine, memory: Memory) -> None:
    await engine.wake_up()
    await asyncio.gather(*(engine.sleep() for _ in range(5)))
    assert memory.calls == ["sleep"]
    await asyncio.gather(engine.wake_up(), engine.wake_up(), engine.sleep(), engine.wake_up())
    assert memory.calls == ["sleep", "wake", "sleep", "wake"]
    assert not engine.is_sleeping


async def test_where_sleeping_fails_the_engine_stays_awake(engine: aengine.Engine, memory: Memory) -> None:
    memory.error = MemoryError("no host memory")
    with pytest.raises(MemoryError):
        await engine.sleep()
    assert not engine.is_sleeping
    await engine.complete(PROMPT, **GREEDY)


async def test_where_others_have_the_memory_it_sleeps_on(engine: aengine.Engine, memory: Memory) -> None:
    await engine.sleep()
    memory.error = torch.OutOfMemoryError("none left")
    with pytest.raises(EngineNotReadyError, match="others have taken"):
        await engine.wake_up()
    assert engine.is_sleeping
    memory.error = None
    await engine.wake_up()
    await engine.complete(PROMPT, **GREEDY)


async def test_an_engine_is_closed_while_it_sleeps(memory: Memory) -> None:
    async with aengine.Engine(sleep_mode=True, **KNOBS) as engine:
        await engine.sleep()
    with pytest.raises(EngineClosedError):
        await engine.wake_up()


async def test_closing_waits_for_a_change_on_the_device(memory: Memory) -> None:
    async with made(memory) as engine:
        memory.bar.clear()
        sleeping = asyncio.create_task(engine.sleep())
        await entered(memory)
        asyncio.get_running_loop().call_later(0.05, memory.bar.set)
    assert memory.calls == ["sleep", "close"]
    await sleeping


async def test_closing_ends_a_change_that_waits(memory: Memory) -> None:
    async with made(memory) as engine:
        stream = await engine.submit(PROMPT, **ENDLESS)
        await stream.take()
        sleeping = asyncio.create_task(engine.sleep())
        await asleep(engine)
    with pytest.raises(EngineClosedError):
        await sleeping
    assert memory.calls == ["close"]


async def test_levels_and_modes_that_there_are_not(engine: aengine.Engine) -> None:
    for level in (0, 2, True):
        with pytest.raises(InvalidRequestError, match="level must be 1"):
            await engine.sleep(level)
    with pytest.raises(InvalidRequestError, match="mode must be wait or abort"):
        await engine.sleep(mode="keep")  # type: ignore[arg-type]


async def test_without_the_knob_it_names_it() -> None:
    async with aengine.Engine(**KNOBS) as engine:
        for call in (engine.sleep, engine.wake_up):
            with pytest.raises(ConfigError, match="sleep_mode"):
                await call()
        assert not engine.is_sleeping


async def test_adapters_stay_and_none_is_loaded_meanwhile(tmp_path: Path) -> None:
    written = Written(tmp_path, 3)
    knobs = EngineConfig(**KNOBS, sleep_mode=True, max_loras=1, lora_loading=True, lora={"a0": written.paths["a0"]})
    async with aengine.Engine(config=knobs) as engine:
        await engine.load_adapter("a1", written.paths["a1"])
        before = [await engine.complete(PROMPT, adapter=name, **GREEDY) for name in ("a0", "a1")]
        await engine.sleep()
        await engine.load_adapter("a2", written.paths["a2"])  # stays in host memory
        await engine.wake_up()
        after = [await engine.complete(PROMPT, adapter=name, **GREEDY) for name in ("a0", "a1")]
        assert [one.token_ids for one in after] == [one.token_ids for one in before]
        await engine.complete(PROMPT, adapter="a2", **GREEDY)
        await idle(engine)

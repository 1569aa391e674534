"""Break, cancellation, timeout, close and failure: nothing hangs, and every page is freed."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

import aengine
from aengine import (
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueFullError,
)
from aengine.cache.kv import KVPool
from aengine.engine import Stream
from aengine.model.config import ModelConfig
from aengine.model.decoder import Decoder
from aengine.runtime.runner import CpuStep
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import StepPlan, StepResult
from tests.engine.conftest import idle

pytestmark = pytest.mark.anyio

ENDLESS = {"max_tokens": 1000, "temperature": 0, "ignore_eos": True}


async def rest(stream: Stream) -> tuple[int, ...]:
    """Return the token ids of all further fragments."""
    ids: list[int] = []
    while taken := await stream.take():
        ids += [token for fragment in taken for token in fragment.token_ids]
    return tuple(ids)


async def aborted(engine: aengine.Engine) -> None:
    """Check that nothing runs any more, long before an endless request would end by itself."""
    await idle(engine)
    assert engine.stats().generated_tokens < 500


async def test_an_engine_that_was_not_entered_says_how_it_is_used() -> None:
    engine = aengine.Engine(device="cpu")
    for ask in (lambda: engine.complete("x"), lambda: engine.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(EngineNotReadyError, match=r"async with aengine\.Engine"):
            await ask()
    with pytest.raises(EngineNotReadyError, match=r"aengine\.LLM"):
        engine.stats()
    with pytest.raises(TypeError, match=r"async with aengine\.Engine"), engine:
        pass


async def test_several_prompts_get_an_error_that_says_how_to_send_them(engine: aengine.Engine) -> None:
    chat = [{"role": "user", "content": "x"}]
    for prompts in (["a", "b"], ("a",), [[1], [2]], ["a", [1]]):
        with pytest.raises(InvalidRequestError, match=r"asyncio\.gather.*LLM\(\.\.\.\)\.generate"):
            await engine.complete(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"engine\.chat, several.*LLM\(\.\.\.\)\.chat"):
        await engine.chat([chat, chat])  # type: ignore[list-item]


@pytest.mark.parametrize("by", ["task", "scope"])
async def test_a_load_that_is_given_up_gives_its_memory_back(by: str) -> None:
    begun, closed = threading.Event(), []

    def start(*arguments: Any) -> Runtime:
        runtime = start_runtime(*arguments)
        close = runtime.runner.close

        def closing() -> None:
            closed.append(runtime)
            close()

        runtime.runner.close = closing  # type: ignore[method-assign]
        begun.set()
        return runtime

    async def enter() -> None:
        knobs = {"kv_cache_gib": 0.1, "host_cache_gib": 0.1, "lora_loading": True}  # tasks that never started
        async with aengine.Engine(device="cpu", progress=False, start=start, **knobs):
            await anyio.sleep(30)

    if by == "task":
        entering = asyncio.create_task(enter())
        await asyncio.to_thread(begun.wait)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    else:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enter)
            await asyncio.to_thread(begun.wait)
            tasks.cancel_scope.cancel()
    assert len(closed) == 1


async def test_break_aborts_at_once(engine: aengine.Engine) -> None:
    async for fragment in engine.generate([300, 301], **ENDLESS):
        assert fragment.finish_reason is None
        break
    await aborted(engine)


async def test_a_held_generator_runs_until_it_is_closed(engine: aengine.Engine) -> None:
    generator = engine.generate([300, 301], **ENDLESS)
    await anext(generator)
    assert engine.stats().running == 1
    await generator.aclose()
    await aborted(engine)


async def test_a_generator_that_is_never_iterated_costs_nothing(engine: aengine.Engine) -> None:
    generator = engine.generate([300, 301], **ENDLESS)
    assert engine.stats().waiting == 0
    del generator
    gc.collect()
    assert engine.stats().waiting == engine.stats().running == 0


async def test_a_closed_engine_keeps_no_model_and_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[KVPool | Tensor]] = []
    make_pool, make_decoder = KVPool.__init__, Decoder.__init__

    def pool_made(self: KVPool, *arguments: Any) -> None:
        make_pool(self, *arguments)
        held.append(weakref.ref(self))

    def decoder_made(self: Decoder, *arguments: Any, **more: Any) -> None:
        make_decoder(self, *arguments, **more)
        held.extend(weakref.ref(weight) for group in self.groups for weight in group.open(()).values())

    monkeypatch.setattr(KVPool, "__init__", pool_made)
    monkeypatch.setattr(Decoder, "__init__", decoder_made)
    gc.disable()  # device memory must be freed without the garbage collector
    try:
        async with aengine.Engine() as engine:
            await engine.complete([300, 301], max_tokens=3)
            assert any(isinstance(one(), KVPool) for one in held)
            assert any(isinstance(one(), Tensor) for one in held)
        assert not any(one() is not None for one in held)
    finally:
        gc.enable()
    assert engine.stats().generated_tokens == 3


async def test_cancelling_the_consumer_aborts(engine: aengine.Engine) -> None:
    started = anyio.Event()

    async def consume() -> None:
        async for _ in engine.generate([300, 301], **ENDLESS):
            started.set()

    async with anyio.create_task_group() as group:
        group.start_soon(consume)
        await started.wait()
        group.cancel_scope.cancel()
    await aborted(engine)


async def test_a_timeout_aborts(engine: aengine.Engine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.complete([300, 301], **ENDLESS)
    await aborted(engine)


async def test_abort_by_id_ends_the_stream(engine: aengine.Engine) -> None:
    stream = await engine.submit([300, 301], request_id="mine", **ENDLESS)
    await stream.take()
    assert engine.abort("mine")
    assert not engine.abort("mine")
    fragments = []
    while taken := await stream.take():
        fragments += taken
    assert fragments[-1].finish_reason == "abort"
    assert fragments[-1].usage is not None


async def test_abort_while_queued(engine: aengine.Engine) -> None:
    running = [await engine.submit([300, number], **ENDLESS) for number in range(32)]
    queued = await engine.submit([300, 301], **ENDLESS)
    await running[0].take()
    assert engine.stats().waiting == 1
    queued.abort()
    assert engine.stats().waiting == 0
    for stream in running:
        stream.abort()
    await aborted(engine)


async def test_a_request_id_is_used_once_at_a_time(engine: aengine.Engine) -> None:
    stream = await engine.submit([300, 301], request_id="twin", **ENDLESS)
    with pytest.raises(InvalidRequestError, match="twin"):
        await engine.submit([300, 301], request_id="twin", **ENDLESS)
    stream.abort()
    await engine.complete([300, 301], max_tokens=1, request_id="twin")


async def test_closing_the_engine_ends_every_stream() -> None:
    async with aengine.Engine(device="cpu", kv_cache_gib=0.1) as engine:
        stream = await engine.submit([300, 301], **ENDLESS)
        await stream.take()
    with pytest.raises(EngineClosedError):
        await rest(stream)
    with pytest.raises(EngineClosedError):
        await engine.complete([300, 301])


async def test_an_exception_in_the_body_closes_the_engine_too() -> None:
    streams = []

    async def body() -> None:
        async with aengine.Engine(device="cpu", kv_cache_gib=0.1) as engine:
            streams.append(await engine.submit([300, 301], **ENDLESS))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await body()
    (stream,) = streams
    with pytest.raises(EngineClosedError):
        await rest(stream)


async def test_beyond_the_queue_bound_the_answer_is_no_at_once() -> None:
    async with aengine.Engine(device="cpu", kv_cache_gib=0.1, max_queue=2, max_num_seqs=1) as engine:
        first = await engine.submit([300, 301], **ENDLESS)
        await first.take()
        waiting = [await engine.submit([300, 301], **ENDLESS) for _ in range(2)]
        with pytest.raises(QueueFullError) as caught:
            await engine.submit([300, 301], **ENDLESS)
        assert caught.value.retry_after > 0
        for stream in (first, *waiting):
            stream.abort()


class Sabotage:
    """Wraps the real runner, and spoils chosen steps."""

    def __init__(self, runtime: Runtime) -> None:
        self.inner = runtime.runner
        self.fail_launch: set[int] = set()
        self.fail_result: set[int] = set()
        self.spoil: dict[int, int] = {}  # step -> index of the draw that is not finite
        self.given_up: list[int] = []  # structured steps that were given up

    def launch(self, plan: StepPlan) -> CpuStep:
        if plan.step in self.fail_launch:
            raise RuntimeError("launch broke")
        step = self.inner.launch(plan)
        outer = self

        class Spoiled(CpuStep):
            def draw(self, masks: NDArray[np.int32] | None) -> None:
                if masks is None:
                    outer.given_up.append(plan.step)
                step.draw(masks)

            async def result(self) -> StepResult:
                result = await step.result()
                if plan.step in outer.fail_result:
                    raise RuntimeError("step broke")
                if plan.step in outer.spoil:
                    result.finite[outer.spoil[plan.step]] = False
                return result

        return Spoiled(plan, step._future)

    def close(self) -> None:
        self.inner.close()


def sabotaged() -> tuple[aengine.Engine, list[Sabotage]]:
    made: list[Sabotage] = []

    def start(
        config: aengine.EngineConfig, folder: object, model: ModelConfig, begin_text: Callable[[], object]
    ) -> Runtime:
        runtime = start_runtime(config, folder, model, begin_text)
        made.append(Sabotage(runtime))
        return Runtime(made[0], runtime.model, runtime.pool, runtime.max_step_tokens)

    return aengine.Engine(device="cpu", kv_cache_gib=0.1, start=start), made


@pytest.mark.parametrize("how", ["fail_launch", "fail_result"])
async def test_a_failing_step_ends_its_requests_and_the_engine_continues(how: str) -> None:
    engine, made = sabotaged()
    async with engine:
        expected = await engine.complete([300, 301], max_tokens=20, temperature=0, ignore_eos=True)
        getattr(made[0], how).add(engine.stats().steps + 5)
        with pytest.raises(EngineFailedError, match="RuntimeError"):
            await engine.complete([300, 301], max_tokens=20, temperature=0, ignore_eos=True)
        await idle(engine)
        again = await engine.complete([300, 301], max_tokens=20, temperature=0, ignore_eos=True)
        assert again.token_ids == expected.token_ids


async def test_a_non_finite_row_fails_alone() -> None:
    engine, made = sabotaged()
    async with engine:
        expected = await engine.complete([300, 301], max_tokens=20, temperature=0, ignore_eos=True)
        first = await engine.submit([300, 301], max_tokens=20, temperature=0, ignore_eos=True)
        second = await engine.submit([302, 303], max_tokens=20, temperature=0, ignore_eos=True)
        made[0].spoil[engine.stats().steps + 6] = 1

        assert await rest(first) == expected.token_ids
        with pytest.raises(NonFiniteLogitsError):
            await rest(second)
        await idle(engine)


async def test_a_bug_in_the_loop_reaches_every_waiter() -> None:
    engine, _ = sabotaged()
    async with engine:
        stream = await engine.submit([300, 301], **ENDLESS)
        await stream.take()
        engine._ready().scheduler.commit = None  # type: ignore[assignment, method-assign]
        with pytest.raises(EngineFailedError):
            await rest(stream)
        assert isinstance(engine.failure, TypeError)
        with pytest.raises(EngineFailedError):
            await engine.complete([300, 301])


async def test_closing_ends_even_if_the_device_raises() -> None:
    engine, made = sabotaged()
    with anyio.fail_after(20):
        async with engine:
            await engine.complete([300, 301], max_tokens=2)
            inner = made[0].inner

            def close() -> None:
                inner.close()
                raise RuntimeError("the device is gone")

            made[0].close = close  # type: ignore[method-assign]
    with pytest.raises(EngineClosedError):
        await engine.complete([300, 301])


async def test_a_copy_that_cannot_be_closed_leaves_nothing_else_open() -> None:
    """The streams of a lost device raise when they are synchronised."""
    closed: list[str] = []

    def start(
        config: aengine.EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]
    ) -> Runtime:
        runtime = start_runtime(config, folder, model, begin_text)
        assert runtime.copies is not None
        [rank] = runtime.copies._ranks
        rank.close = fail  # type: ignore[method-assign]
        runtime.copies._ranks = [rank, SimpleNamespace(close=lambda: closed.append("second rank"))]  # type: ignore[list-item]
        close = runtime.runner.close

        def close_runner() -> None:
            closed.append("runner")
            close()
            fail()

        runtime.runner.close = close_runner  # type: ignore[method-assign]
        return replace(runtime, memory=SimpleNamespace(close=lambda: closed.append("memory")))  # type: ignore[arg-type]

    def fail() -> None:
        raise RuntimeError("the device is gone")

    async with aengine.Engine(device="cpu", kv_cache_gib=0.1, host_cache_gib=0.05, start=start):
        pass
    assert closed == ["second rank", "runner", "memory"]


async def test_an_engine_is_entered_once() -> None:
    engine = aengine.Engine(device="cpu", kv_cache_gib=0.1, model="/no/such/folder")
    with pytest.raises(aengine.CheckpointError):
        await engine.__aenter__()
    with pytest.raises(EngineClosedError, match="once"):
        await engine.__aenter__()

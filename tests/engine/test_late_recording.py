"""What a start-up has left to be recorded is recorded while nothing runs, or as steps miss it; requests go first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import aengine
from aengine.config import EngineConfig
from aengine.engine.loop import BUSY_PAUSE
from aengine.model.config import ModelConfig
from aengine.runtime.runner import LaunchedStep, Runner
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.step_plan import StepPlan
from tests.engine.test_sleep import GREEDY, KNOBS, PROMPT, Memory

pytestmark = pytest.mark.anyio
PIECE_SECONDS = 0.01


class Device:
    """A runner and a recorder that note what they are asked for."""

    def __init__(self, left: int) -> None:
        self.log: list[str] = []
        self.left = left
        self.missed_at: list[float] = []
        self.missed_behind: list[str] = []  # what was noted last by then
        self.missing = 0  # pieces that steps miss

    def start(self, config: EngineConfig, folder: Path, model: ModelConfig, wait: Callable[[], object]) -> Runtime:
        made = start_runtime(config, folder, model, wait)
        self._runner: Runner = made.runner
        noting: Any = self
        return replace(made, runner=noting, recorder=noting, memory=Memory())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.log.append("launch")
        return self._runner.launch(plan)

    def record_next(self, missed: bool = False) -> bool:
        if missed:
            self.missed_behind += self.log[-1:]
            self.missed_at.append(time.monotonic())
            found = self.missing > 0
            self.missing -= found
            return found
        if not self.left:
            return False
        self.left -= 1
        time.sleep(PIECE_SECONDS)
        self.log.append("piece")
        return True

    def close(self) -> None:
        """Of the recorder, then of the runner."""
        if "closed" in self.log:
            self._runner.close()
        self.log.append("closed")

    def engine(self) -> aengine.Engine:
        return aengine.Engine(config=EngineConfig(**KNOBS, sleep_mode=True), start=self.start)

    async def pieces(self, count: int) -> None:
        """So many have been recorded."""
        with anyio.fail_after(30):
            while self.log.count("piece") < count:  # noqa: ASYNC110 - the loop has no such event
                await anyio.sleep(0.001)


async def test_at_rest_all_is_recorded_piece_by_piece() -> None:
    device = Device(left=12)
    async with device.engine():
        await device.pieces(12)
        await anyio.sleep(0.05)
    assert device.log == ["piece"] * 12 + ["closed", "closed"]


async def test_a_request_waits_for_one_piece_at_most_and_the_others_for_its_end() -> None:
    device = Device(left=1000)
    async with device.engine() as engine:
        alone = await engine.complete(PROMPT, **GREEDY)
        for _ in range(5):
            await device.pieces(device.log.count("piece") + 3)
            before = len(device.log)
            again = await engine.complete(PROMPT, **GREEDY)
            assert again.token_ids == alone.token_ids
            since = device.log[before:]
            assert since[: since.index("launch")] in ([], ["piece"])
            steps = since[since.index("launch") :]
            assert steps[: steps.count("launch")] == ["launch"] * len(alone.token_ids)
        await device.pieces(device.log.count("piece") + 3)
    assert 0 < device.left < 1000


async def test_a_request_that_takes_its_way_through_the_loop_waits_for_few() -> None:
    device = Device(left=1000)
    async with device.engine() as engine:
        await device.pieces(3)
        before = len(device.log)
        for _ in range(50):  # as often as bodies are read and parsed in pieces
            await anyio.lowlevel.checkpoint()
        await engine.complete(PROMPT, **GREEDY)
        assert device.log[before:].index("launch") <= 3


async def test_steps_that_never_pause_have_recorded_what_they_miss_now_and_then() -> None:
    device = Device(left=0)
    device.missing = 2
    async with device.engine() as engine:
        before = time.monotonic()
        while time.monotonic() - before < 4 * BUSY_PAUSE:
            await engine.complete(PROMPT, **GREEDY)
    assert device.missing == 0
    assert 2 <= len(device.missed_at) <= 2 + (device.missed_at[-1] - device.missed_at[0]) / BUSY_PAUSE
    assert all(later - earlier >= BUSY_PAUSE for earlier, later in zip(device.missed_at, device.missed_at[1:]))


class Noted:
    """A launched step that notes when it may draw."""

    def __init__(self, step: LaunchedStep, log: list[str]) -> None:
        self._step, self._log = step, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def draw(self, masks: Any) -> None:
        self._log.append("draw")
        self._step.draw(masks)


async def test_nothing_is_recorded_while_the_draws_of_a_step_wait_for_a_grammar() -> None:
    """But behind them: such steps may never pause."""
    device = Device(left=0)
    device.missing = 2
    async with device.engine() as engine:
        real = device._runner.launch

        def launch(plan: StepPlan) -> Any:
            assert plan.structured
            return Noted(real(plan), device.log)

        device._runner.launch = launch  # type: ignore[method-assign]
        structured = aengine.Structured(regex="[ab]{30}")
        before = time.monotonic()
        while time.monotonic() - before < 4 * BUSY_PAUSE:
            await engine.complete(PROMPT, **(GREEDY | {"max_tokens": 20, "ignore_eos": False}), structured=structured)
    assert device.missing == 0
    assert set(device.missed_behind) == {"draw"}


async def test_nothing_is_recorded_while_the_engine_sleeps() -> None:
    device = Device(left=1000)
    async with device.engine() as engine:
        await device.pieces(3)
        await engine.sleep()
        before = len(device.log)
        await anyio.sleep(0.1)
        assert len(device.log) == before
        await engine.wake_up()
        await device.pieces(device.log.count("piece") + 3)
    assert device.log[-2:] == ["closed", "closed"]

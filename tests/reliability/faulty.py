"""A device that breaks on request: a prompt that ends in a trigger breaks the step of its third token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.runner import CpuRunner, CpuStep, Executor, Forwarded, Runner
from aengine.runtime.startup.ready import Runtime
from aengine.runtime.startup.start import start_runtime
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan, StepResult

OUT_OF_MEMORY, LAUNCH_ERROR, STEP_ERROR, NAN, DEATH, LATE_DEATH = range(3900, 3906)  # token ids
TRIGGERS = range(OUT_OF_MEMORY, LATE_DEATH + 1)
DECODES = 2  # of the row before it breaks
DYING_SECONDS = 0.3  # until a device that died in the middle of a step says so


class Faulty:
    """A runner around the real one."""

    def __init__(self, inner: CpuRunner) -> None:
        self.inner: Runner = inner
        self._armed: dict[int, list[int]] = {}  # row -> trigger, decodes so far
        self._dead = False
        self.dying = asyncio.Event()
        self.launches_after_death = 0
        inner._executor = Poisoned(inner._executor, self)
        self.nan_rows: set[int] = set()

    def launch(self, plan: StepPlan) -> CpuStep:
        if self._dead:
            self.launches_after_death += 1
            raise lost()
        for new in plan.new_rows:
            self._armed.pop(new.row, None)
            self.nan_rows.discard(new.row)
            if new.tokens[new.prompt_len - 1] in TRIGGERS:
                self._armed[new.row] = [new.tokens[new.prompt_len - 1], 0]
        due = self._due(plan)
        if due == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if due == LAUNCH_ERROR:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        if due == DEATH:
            self._dead = True
            self.dying.set()
            raise lost()
        step = self.inner.launch(plan)
        return FaultyStep(plan, step, self, due)

    def _due(self, plan: StepPlan) -> int | None:
        due = None
        for row in plan.decode:
            if row in self._armed:
                trigger, decodes = self._armed[row]
                self._armed[row][1] += 1
                if decodes == DECODES:
                    del self._armed[row]
                    due = trigger
                    if due == NAN:
                        self.nan_rows.add(row)
        return due

    async def judge(self, due: int | None) -> None:
        """Raise the error planned for the step."""
        if due == STEP_ERROR:
            raise RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED")
        if due == LATE_DEATH:
            self._dead = True
            self.dying.set()
            await asyncio.sleep(DYING_SECONDS)
        if self._dead:
            raise lost()

    def trace(self, timeline: Any) -> None:
        self.inner.trace(timeline)

    def close(self) -> None:
        self.inner.close()
        if self._dead:
            raise lost()


class FaultyStep(CpuStep):
    def __init__(self, plan: StepPlan, step: CpuStep, runner: Faulty, due: int | None) -> None:
        super().__init__(plan, step._future)
        self._runner = runner
        self._due = due

    async def result(self) -> StepResult:
        result = await super().result()
        await self._runner.judge(self._due)
        return result


class Poisoned:
    """An executor whose logits are NaN in the rows that were named."""

    def __init__(self, inner: Executor, runner: Faulty) -> None:
        self._inner = inner
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None:
        if forwarded.logits is not None:
            places = [place for place, row in enumerate(forwarded.row_list) if row in self._runner.nan_rows]
            with torch.inference_mode():
                forwarded.logits[places] = float("nan")
        return self._inner.draw(forwarded, masks)


def lost() -> torch.AcceleratorError:
    return torch.AcceleratorError("CUDA error: unspecified launch failure")


def start(config: EngineConfig, folder: Path, model: ModelConfig, begin_text: Callable[[], object]) -> Runtime:
    """For `Engine(start=...)`."""
    runtime = start_runtime(config, folder, model, begin_text)
    assert isinstance(runtime.runner, CpuRunner)
    return Runtime(Faulty(runtime.runner), runtime.model, runtime.pool, runtime.max_step_tokens)


def factory(config: EngineConfig) -> aengine.Engine:
    return aengine.Engine(config=config, start=start)


app = create_app(engine_factory=factory)  # for a server's command line


if __name__ == "__main__":  # `aengine serve` on such a device
    import sys

    import aengine.app
    from aengine.cli import main

    aengine.app._default_factory = lambda: factory
    sys.exit(main(["serve", *sys.argv[1:]]))

"""Runs every step on all ranks. The results of the first rank are the step's results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.kernels.collective.threads import Meeting
from aengine.runtime.step.executor import Executor, Forwarded, Outcome
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan

T = TypeVar("T")


class RankLauncher(Protocol):
    """Calls one function for each rank. The calls may wait for each other."""

    def __call__(self, calls: Sequence[Callable[[], T]], short: bool = False) -> list[T]:
        """Return the results by rank.

        short: each call only enqueues a few kernels that are already loaded, so that no call waits for another rank.

        Raises: the first rank's error that was not caused by waiting for another failed rank.
        """
        ...

    def close(self) -> None:
        """End the workers. Call it last, when nothing is running."""
        ...


class RankedExecutor:
    """`Executor` over the executors of all ranks."""

    def __init__(self, ranks: Sequence[Executor], launcher: RankLauncher) -> None:
        self._ranks = ranks
        self._launcher = launcher

    def execute(self, plan: StepPlan) -> Outcome:
        return self._launcher([partial(rank.execute, plan) for rank in self._ranks], self.replays(plan))[0]

    def forward(self, plan: StepPlan) -> Forwarded:
        ranks = self._launcher([partial(rank.forward, plan) for rank in self._ranks])
        return replace(ranks[0], ranks=ranks)

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None:
        calls = [partial(rank.draw, one, masks) for rank, one in zip(self._ranks, forwarded.ranks, strict=True)]
        return self._launcher(calls, short=True)[0]

    def replays(self, plan: StepPlan) -> bool:
        return all(rank.replays(plan) for rank in self._ranks)

    def close(self) -> None:
        self._launcher.close()


class ThreadedRanks:
    """`RankLauncher` on a CPU: one thread for each rank. They meet at each collective operation."""

    def __init__(self, meeting: Meeting, count: int, torch_threads: int) -> None:
        """torch_threads: how many threads of torch each rank uses in a step."""
        self._meeting = meeting
        self._workers = [
            ThreadPoolExecutor(1, f"aengine-rank-{rank}", torch.set_num_threads, (torch_threads,))
            for rank in range(count)
        ]

    def __call__(self, calls: Sequence[Callable[[], T]], short: bool = False) -> list[T]:
        futures = [worker.submit(self._guarded, call) for worker, call in zip(self._workers, calls, strict=True)]
        errors = [error for error in map(Future.exception, futures) if error is not None]
        if not errors:
            return [future.result() for future in futures]
        self._meeting.renew()
        try:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        finally:  # a frame that refers to its own error would keep the step's memory alive
            futures.clear()
            errors.clear()

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            self._meeting.give_up()  # ranks that wait for this one raise as well
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=True)

"""Several executors as one: every rank runs every step, and the first one's results are the step's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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


class Together(Protocol):
    """Calls a function of each rank, in a way in which ranks can wait for each other."""

    def __call__(self, calls: Sequence[Callable[[], T]], short: bool = False) -> list[T]:
        """What they return, by rank. Raises what the first of those raised that did not merely wait for another.

        short: each only enqueues a few launches that were made before, so that none of them waits for another.
        """
        ...

    def close(self) -> None:
        """To be called last, when nothing is running."""
        ...


@dataclass(slots=True)
class RankedForwarded(Forwarded):
    """The first rank's, with those of all ranks."""

    ranks: Sequence[Forwarded] = ()


class RankedExecutor:
    """`Executor` over the executors of all ranks."""

    def __init__(self, ranks: Sequence[Executor], together: Together) -> None:
        self._ranks = ranks
        self._together = together

    def execute(self, plan: StepPlan) -> Outcome:
        return self._together([partial(rank.execute, plan) for rank in self._ranks], self.replays(plan))[0]

    def forward(self, plan: StepPlan) -> Forwarded:
        ranks = self._together([partial(rank.forward, plan) for rank in self._ranks])
        first = ranks[0]
        return RankedForwarded(
            first.logits,
            first.row_list,
            first.rows,
            first.positions,
            first.scores,
            first.sums,
            first.pools,
            first.own,
            ranks,
        )

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None:
        if not isinstance(forwarded, RankedForwarded):
            raise TypeError("these are the hidden states of one rank alone")
        calls = [partial(rank.draw, one, masks) for rank, one in zip(self._ranks, forwarded.ranks, strict=True)]
        return self._together(calls, short=True)[0]

    def replays(self, plan: StepPlan) -> bool:
        return all(rank.replays(plan) for rank in self._ranks)

    def close(self) -> None:
        self._together.close()


class ThreadedRanks:
    """`Together` on a CPU: a thread for each rank, all of which meet wherever their shards need each other."""

    def __init__(self, meeting: Meeting, count: int, torch_threads: int) -> None:
        """torch_threads: of each rank, within a step."""
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
        finally:  # an error whose frames keep it is a cycle, with the step's memory
            futures.clear()
            errors.clear()

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BaseException:
            self._meeting.give_up()  # whoever waits for this rank raises as well
            raise

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown(wait=True)

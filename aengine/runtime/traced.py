"""Records in a timeline when the device was busy with each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from aengine.runtime.step.executor import Executor, Forwarded, Outcome
from aengine.sampling.sampler import Draws
from aengine.step_plan import StepPlan
from aengine.timeline import DEVICE, Timeline, plan_counts

ANCHOR_SECONDS = 5.0  # CUDA returns the time between events as float32 ms, which is imprecise for longer times


class Spans(Protocol):
    """Measures how long the device is busy with the work that a block of code enqueues."""

    def busy(self, name: str, counts: dict[str, int]) -> AbstractContextManager[None]: ...


class HostSpans:
    """`Spans` on a CPU. The work is complete at the end of the block."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @contextmanager
    def busy(self, name: str, counts: dict[str, int]) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._timeline.span(DEVICE, name, begin, time.perf_counter(), counts)


class _Pending(NamedTuple):
    begin: torch.cuda.Event
    end: torch.cuda.Event
    name: str
    counts: dict[str, int]


class CudaSpans:
    """`Spans` on a GPU. CUDA events surround the enqueued work. They are read when they are complete, never awaited."""

    def __init__(self, timeline: Timeline, stream: torch.cuda.Stream) -> None:
        """Synchronise the stream once, to relate its events to the host's clock."""
        self._timeline = timeline
        self._stream = stream
        self._pending: deque[_Pending] = deque()
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor.record(stream)
        self._anchor.synchronize()
        self._anchor_time = time.perf_counter()
        timeline.at_close(self.settle)

    @contextmanager
    def busy(self, name: str, counts: dict[str, int]) -> Iterator[None]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._stream)
        yield
        end.record(self._stream)
        self._pending.append(_Pending(begin, end, name, counts))
        self.settle()

    def settle(self) -> None:
        """Record the spans that are complete."""
        while self._pending and self._pending[0].end.query():
            span = self._pending.popleft()
            begin, end = (
                self._anchor_time + self._anchor.elapsed_time(event) / 1e3 for event in (span.begin, span.end)
            )
            self._timeline.span(DEVICE, span.name, begin, end, span.counts)
            if end - self._anchor_time > ANCHOR_SECONDS:
                self._anchor, self._anchor_time = span.end, end


class TracedExecutor:
    """Runs another executor and records how long the device takes."""

    def __init__(self, executor: Executor, spans: Spans) -> None:
        self._executor = executor
        self._spans = spans

    def execute(self, plan: StepPlan) -> Outcome:
        with self._spans.busy("step", plan_counts(plan)):
            return self._executor.execute(plan)

    def forward(self, plan: StepPlan) -> Forwarded:
        with self._spans.busy("forward", plan_counts(plan)):
            return self._executor.forward(plan)

    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None:
        with self._spans.busy("draw", {"draws": len(forwarded.row_list)}):
            return self._executor.draw(forwarded, masks)

    def replays(self, plan: StepPlan) -> bool:
        return self._executor.replays(plan)

    def close(self) -> None:
        self._executor.close()

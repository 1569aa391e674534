"""When the device was busy: an executor that tells a timeline about each step."""

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

ANCHOR_SECONDS = 5.0  # CUDA tells distances between events as float32 milliseconds, which are fine only while short


class Spans(Protocol):
    """Notes how long the device takes for what happens within."""

    def busy(self, name: str, counts: dict[str, int]) -> AbstractContextManager[None]: ...


class HostSpans:
    """For a device whose work is done when the call returns: the CPU's worker."""

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
    """For work that is only enqueued: CUDA events around it, read once they have happened, never waited for."""

    def __init__(self, timeline: Timeline, stream: torch.cuda.Stream) -> None:
        """Waits for the stream once, to learn which event is what time."""
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
        """Tell the spans that are over."""
        while self._pending and self._pending[0].end.query():
            span = self._pending.popleft()
            begin, end = (
                self._anchor_time + self._anchor.elapsed_time(event) / 1e3 for event in (span.begin, span.end)
            )
            self._timeline.span(DEVICE, span.name, begin, end, span.counts)
            if end - self._anchor_time > ANCHOR_SECONDS:
                self._anchor, self._anchor_time = span.end, end


class TracedExecutor:
    """Does what another executor does, and tells how long the device takes for it."""

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

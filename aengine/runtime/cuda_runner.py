"""Steps on a CUDA device: enqueued on one stream by the loop itself, awaited through their events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.runtime.clock import DeviceClock
from aengine.runtime.decode_graphs import DecodeGraphs
from aengine.runtime.runner import StepExecutor, read_draws
from aengine.runtime.scoring import ChunkScores
from aengine.sampling.logprobs import DrawLogprobs
from aengine.sampling.sampler import Draws
from aengine.types import StepPlan, StepResult

RING = 4  # results in flight, one more than steps can be


class GraphedExecutor(StepExecutor):
    """Replays a graph where a step is all decode; everything else is enqueued kernel by kernel."""

    graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Draws | None:
        graphs = self.graphs
        if graphs is None or plan.prefill or len(plan.decode) > graphs.sizes[-1]:
            return super().execute(plan)
        rows = self._rows
        rows.grow(plan.new_pages)
        logits, row_index = graphs.forward(plan.decode, plan.shared)
        if self._sampler.simple(plan.decode):
            draws = graphs.draw(plan.decode)
        else:
            lengths = rows.length[row_index] + 1
            draws = self._sampler.sample(logits, plan.decode, row_index, lengths)
            rows.last_token[row_index] = draws.token_ids
            rows.length[row_index] = lengths
        for row in plan.decode:
            rows.lengths[row] += 1
        return draws


@dataclass(slots=True)
class _Slot:
    """Pinned memory that one step's results are copied into."""

    token_ids: Tensor
    finite: Tensor


class CudaStep:
    """A step on the device's queue."""

    def __init__(
        self,
        plan: StepPlan,
        runner: CudaRunner,
        event: torch.cuda.Event,
        draws: Draws | None,
        scores: list[ChunkScores],
    ) -> None:
        self.plan = plan
        self._runner = runner
        self._future = runner.watch(event)
        self._draws = draws  # on the host once the event has happened
        self._scores = scores  # likewise

    async def result(self) -> StepResult:
        await self._future
        return read_draws(self._draws, self._runner.logprobs_of, self.plan, self._scores)


class CudaRunner:
    """Enqueues steps behind each other; launching never waits for the device."""

    def __init__(self, executor: StepExecutor, device: torch.device, stream: torch.cuda.Stream, max_draws: int) -> None:
        self._executor = executor
        self._device = device
        self._stream = stream
        self._clock: DeviceClock | None = None
        self._asked: dict[int, int | None] = {}
        self._ring = [
            _Slot(
                torch.empty(max_draws, dtype=torch.int64, pin_memory=True),
                torch.empty(max_draws, dtype=torch.bool, pin_memory=True),
            )
            for _ in range(RING)
        ]

    def launch(self, plan: StepPlan) -> CudaStep:
        for new in plan.new_rows:
            self._asked[new.row] = new.params.logprobs
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            draws = self._executor.execute(plan)
            host = None if draws is None else self._to_host(plan, draws)
            scores = [one.mapped(_pinned) for one in self._executor.take_scores()]
            event = torch.cuda.Event()
            event.record(self._stream)
        return CudaStep(plan, self, event, host, scores)

    def watch(self, event: torch.cuda.Event) -> asyncio.Future[None]:
        """A future for a recorded event."""
        if self._clock is None:  # made on the loop that launches
            self._clock = DeviceClock(self._device)
        return self._clock.watch(event)

    def logprobs_of(self, row: int) -> int | None:
        """How many logprobs the row's owner asked for."""
        return self._asked.get(row)

    def _to_host(self, plan: StepPlan, draws: Draws) -> Draws:
        slot = self._ring[plan.step % RING]
        count = len(draws.token_ids)
        token_ids, finite = slot.token_ids[:count], slot.finite[:count]
        token_ids.copy_(draws.token_ids, non_blocking=True)
        finite.copy_(draws.finite, non_blocking=True)
        logprobs = draws.logprobs
        return Draws(
            token_ids,
            finite,
            None
            if logprobs is None
            else DrawLogprobs(_pinned(logprobs.sampled), _pinned(logprobs.top_ids), _pinned(logprobs.top)),
        )

    def close(self) -> None:
        self._stream.synchronize()
        if self._clock is not None:
            self._clock.close()


def _pinned(tensor: Tensor) -> Tensor:
    """A copy on its way into pinned memory."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

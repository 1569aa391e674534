"""Steps on a CUDA device: enqueued on one stream by the loop itself, awaited through their events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.runtime.clock import DeviceClock
from aengine.runtime.decode_graphs import DecodeGraphs
from aengine.runtime.prefill_graphs import PrefillGraphs, PrefillShape
from aengine.runtime.runner import StepExecutor, read_draws
from aengine.sampling.logprobs import DrawLogprobs
from aengine.sampling.sampler import Draws
from aengine.types import StepPlan, StepResult

RING = 4  # results in flight, one more than steps can be


class GraphedExecutor(StepExecutor):
    """Replays a graph where one was captured for the step; everything else is enqueued kernel by kernel."""

    decode_graphs: DecodeGraphs | None = None
    prefill_graphs: PrefillGraphs | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Draws | None:
        if plan.prefill:
            graphs = self.prefill_graphs
            shape = None if graphs is None else graphs.shape_for(plan)
            if graphs is None or shape is None:
                return super().execute(plan)
            return self._replay_prefill(plan, graphs, shape)
        if self.decode_graphs is None or len(plan.decode) > self.decode_graphs.sizes[-1]:
            return super().execute(plan)
        return self._replay_decode(plan, self.decode_graphs)

    def _replay_decode(self, plan: StepPlan, graphs: DecodeGraphs) -> Draws:
        rows = self._rows
        rows.grow(plan.new_pages)
        logits, row_index = graphs.forward(plan.decode, plan.shared)
        if self._sampler.simple(plan.decode):
            draws = graphs.draw(plan.decode)
        else:
            lengths = rows.length[row_index] + 1
            draws = self._sampler.sample(logits.float(), plan.decode, row_index, lengths)
            rows.last_token[row_index] = draws.token_ids
            rows.length[row_index] = lengths
        for row in plan.decode:
            rows.lengths[row] += 1
        return draws

    def _replay_prefill(self, plan: StepPlan, graphs: PrefillGraphs, shape: PrefillShape) -> Draws | None:
        rows = self._rows
        rows.admit(plan.new_rows)
        self._sampler.set_rows(plan.new_rows)
        rows.grow(plan.new_pages)
        hidden, draw_rows, draw_positions = graphs.replay(plan, shape)
        draws = self._draw(hidden, plan.sampled_rows, draw_rows, draw_positions)
        for row in plan.decode:
            rows.lengths[row] += 1
        for chunk in plan.prefill:
            rows.lengths[chunk.row] = chunk.start + len(chunk.token_ids)
        self._copy_pages(plan)
        return draws

    def _sample(self, logits: Tensor, row_list: list[int], rows: Tensor, positions: Tensor) -> Draws:
        if self._sampler.simple(row_list):
            return self._sampler.draw_simple(logits, rows, positions)
        return super()._sample(logits, row_list, rows, positions)


@dataclass(slots=True)
class _Slot:
    """Pinned memory that one step's results are copied into."""

    token_ids: Tensor
    finite: Tensor


class CudaStep:
    """A step on the device's queue."""

    def __init__(self, plan: StepPlan, runner: CudaRunner, event: torch.cuda.Event, draws: Draws | None) -> None:
        self.plan = plan
        self._runner = runner
        self._future = runner.watch(event)
        self._draws = draws  # on the host once the event has happened

    async def result(self) -> StepResult:
        await self._future
        return read_draws(self._draws, self._runner.logprobs_of, self.plan)


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
            event = torch.cuda.Event()
            event.record(self._stream)
        return CudaStep(plan, self, event, host)

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

"""Steps on a CUDA device: the loop enqueues them on one stream and awaits their events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.errors import DeviceLostError
from aengine.kernels.decodes import triton_decodes
from aengine.runtime.cuda.clock import DeviceClock
from aengine.runtime.cuda.decode_graphs import DecodeGraphs
from aengine.runtime.cuda.decode_shapes import CAPTURED_KINDS, DecodeShape
from aengine.runtime.cuda.lost import PEER_TIMEOUT
from aengine.runtime.cuda.prefill_graphs import PrefillGraphs
from aengine.runtime.runner import StepExecutor
from aengine.runtime.step.cells import StepShape
from aengine.runtime.step.executor import Executor, Forwarded, Outcome, TokenPass
from aengine.runtime.step.results import read_outcome
from aengine.runtime.step.written import TURNS
from aengine.runtime.traced import CudaSpans, TracedExecutor
from aengine.sampling.draw import DrawLogprobs
from aengine.sampling.sampler import Draws, Kind
from aengine.step_plan import StepPlan, StepResult
from aengine.timeline import Timeline
from aengine.types import DeviceMemory

Fits = Callable[[int, Sequence[int], int], bool]


@dataclass(slots=True)
class PendingOutcome:
    """A step whose kernels are all enqueued, with host tensors for its results."""

    done: asyncio.Future[None]
    outcome: Outcome  # valid once `done` is done
    failed: Tensor  # [ranks] int32, valid once `done` is done; not 0 if the rank got no answer from another rank


class GraphedExecutor(StepExecutor):
    """Replays a captured graph if one fits the step. Otherwise it launches kernel by kernel."""

    decode_graphs: DecodeGraphs | None = None
    replays_ends = True  # whether the second graphs of decodes are replayed
    prefill_graphs: PrefillGraphs | None = None

    def add_graphs(self, decode: list[int], drafted: Sequence[DecodeShape], prefill: list[int], fits: Fits) -> None:
        """Prepare the graphs of some sizes, as in `GraphSizes`. Nothing is captured yet.

        fits: the `fits` method of the attention backend.
        """
        decoder, kv, rows, sampler, proposer = self._decoder, self.kv, self._rows, self._sampler, self._proposer
        # All graphs share one pool, because only one runs at a time.
        memory = torch.cuda.graph_pool_handle() if rows.device.type == "cuda" else None
        if decode:
            shapes = [*map(DecodeShape, decode), *drafted]
            self.decode_graphs = DecodeGraphs(
                decoder, kv, sampler, rows, proposer, triton_decodes, shapes, memory, self._states
            )
        if prefill:
            taps = None if proposer is None else proposer.taps
            self.prefill_graphs = PrefillGraphs(decoder, kv, rows, prefill, fits, memory, self._states, taps)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Outcome:
        kind, graphs = self._sampler.kind(plan.decode), self.decode_graphs
        if graphs is None or (shape := self._whole_shape_for(plan, kind)) is None:
            return super().execute(plan)
        self._begin_replay(plan)
        written = graphs.replay(plan, shape, kind)  # also makes the drawn tokens the rows' last tokens
        self._copy_states(plan)
        return Outcome(None, written=written)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        graphs = self.decode_graphs
        if graphs is None or (shape := self._forward_shape_for(plan)) is None:
            return super().forward(plan)
        self._begin_replay(plan)
        own, draw_rows, positions = graphs.replay_forward(plan, shape)
        self._copy_states(plan)
        return Forwarded(plan, self._decoder.head.all_logits(own), plan.draw_rows, draw_rows, positions)

    def replays(self, plan: StepPlan) -> bool:
        return not plan.encodings and self._whole_shape_for(plan, self._sampler.kind(plan.decode)) is not None

    def _whole_shape_for(self, plan: StepPlan, kind: Kind) -> DecodeShape | None:
        """Return the shape of `decode_graphs` for a step, its draws and its proposals. None: there is none.

        A structured step needs masks before it draws.
        """
        graphs = self.decode_graphs
        if graphs is None or plan.prefill or plan.structured or kind not in CAPTURED_KINDS or not self.replays_ends:
            return None
        return graphs.shape_for(plan)

    def _forward_shape_for(self, plan: StepPlan) -> DecodeShape | None:
        """Return the shape of `decode_graphs` for only the forward pass of a step. None: there is none."""
        graphs = self.decode_graphs
        return None if graphs is None or plan.prefill or self._reads_states(plan) else graphs.exact_shape_for(plan)

    def _pass(self, plan: StepPlan) -> TokenPass:
        graphs, shape = self.prefill_graphs, self._prefill_shape_for(plan)
        if graphs is None or shape is None:
            return super()._pass(plan)
        return graphs.replay(plan, shape)

    def _prefill_shape_for(self, plan: StepPlan) -> StepShape | None:
        graphs = self.prefill_graphs
        if (
            graphs is None
            or plan.needs_all_tokens
            or any(chunk.images is not None for chunk in plan.prefill)  # graphs have neither embeddings nor grids
            or not (plan.prefill or any(plan.drafts) or self._reads_states(plan))
        ):
            return None
        return graphs.shape_for(plan)

    def _reads_states(self, plan: StepPlan) -> bool:
        """Return whether a draft head reads the step's hidden states. Graphs of decodes do not keep them."""
        return plan.is_read and self._proposer is not None and self._proposer.taps is not None

    def _begin_replay(self, plan: StepPlan) -> None:
        self._begin(plan)
        self._rows.advance(plan)

    def _sample(self, logits: Tensor, draws: Forwarded, masks: NDArray[np.int32] | None) -> Draws:
        kind = self._sampler.kind(draws.row_list) if masks is None else Kind.ANY
        if kind is Kind.SIMPLE:
            return self._sampler.draw_simple(logits, draws.rows, draws.positions)
        if kind is Kind.FILTERED:
            return self._sampler.draw_filtered(logits, draws.rows, draws.positions)
        return self._sampler.sample(logits, draws.row_list, draws.rows, draws.positions, masks)


@dataclass(slots=True)
class _ResultSlot:
    """Pinned memory for the results of one step."""

    token_ids: Tensor
    finite: Tensor
    failed: Tensor  # [ranks] int32


class CudaStep:
    """`LaunchedStep` on CUDA devices."""

    def __init__(self, plan: StepPlan, runner: CudaRunner) -> None:
        self.plan = plan
        self._runner = runner
        self._forwarded: Forwarded | None = None
        self._pending: PendingOutcome | None = None
        if plan.structured:
            self._forwarded = runner.enqueue_forward(plan)
        else:
            self._pending = runner.enqueue(plan)

    def draw(self, masks: NDArray[np.int32] | None) -> None:
        if self._forwarded is not None:
            with self._runner.device_errors():
                self._pending = self._runner.enqueue_draws(self.plan, self._forwarded, masks)
            self._forwarded = None

    async def result(self) -> StepResult:
        if self._pending is None:
            raise RuntimeError(f"the draws of step {self.plan.step} were never enqueued")
        pending = self._pending
        with self._runner.device_errors():
            await pending.done
            if pending.failed.any():
                raise DeviceLostError(PEER_TIMEOUT)
            return read_outcome(pending.outcome, self._runner.logprob_count, self.plan)


class CudaRunner:
    """Enqueues steps in order. Launching never waits for the device."""

    def __init__(
        self,
        executor: Executor,
        streams: Sequence[torch.cuda.Stream],
        max_draws: int,
        failed: Sequence[Tensor],
    ) -> None:
        """Args:
        streams: One for each rank, on its device. Results come from the first.
        max_draws: The most draws in one step.
        failed: int32 [1] on each rank's device, not 0 after one of its kernels got no answer from another rank.
        """
        self._executor = executor
        self._streams = streams
        self._stream = streams[0]
        self._failed = failed
        self._clock: DeviceClock | None = None
        self._logprob_counts: dict[int, int | None] = {}
        self._ring = [
            _ResultSlot(
                torch.empty(max_draws, dtype=torch.int64, pin_memory=True),
                torch.empty(max_draws, dtype=torch.bool, pin_memory=True),
                torch.empty(len(failed), dtype=torch.int32, pin_memory=True),
            )
            for _ in range(TURNS)
        ]

    def launch(self, plan: StepPlan) -> CudaStep:
        for new in plan.new_rows:
            self._logprob_counts[new.row] = new.params.logprobs
        with self.device_errors():
            return CudaStep(plan, self)

    @contextmanager
    def device_errors(self) -> Iterator[None]:
        """Turn an error into DeviceLostError if the device's context has failed.

        The device is queried, because a later call of any library may report a kernel's fault, as any error.
        """
        try:
            yield
        except Exception as error:
            try:
                for stream in self._streams:
                    stream.query()  # does not wait
            except RuntimeError:
                raise DeviceLostError(f"the device is lost: {type(error).__name__}") from error
            raise

    def enqueue(self, plan: StepPlan) -> PendingOutcome:
        """Enqueue a whole step."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._finish(plan, self._executor.execute(plan))

    def enqueue_forward(self, plan: StepPlan) -> Forwarded:
        """Enqueue the forward pass of a step."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._executor.forward(plan)

    def enqueue_draws(self, plan: StepPlan, forwarded: Forwarded, masks: NDArray[np.int32] | None) -> PendingOutcome:
        """Enqueue the draws of a step after its forward pass."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            return self._finish(plan, forwarded.outcome(self._executor.draw(forwarded, masks)))

    def _finish(self, plan: StepPlan, outcome: Outcome) -> PendingOutcome:
        host = Outcome(
            None if outcome.draws is None else self._to_host(plan, outcome.draws),
            [one.mapped(_pinned) for one in outcome.scores],
            None if outcome.sums is None else _pinned(outcome.sums),
            None if outcome.pools is None else outcome.pools.mapped(_pinned),
            outcome.written,
        )
        failed = self._ring[plan.step % TURNS].failed
        for rank, cell in enumerate(self._failed):
            with torch.cuda.stream(self._streams[rank]):
                failed[rank].copy_(cell[0], non_blocking=True)
        events = [stream.record_event() for stream in self._streams]
        if self._clock is None:  # needs the running loop
            self._clock = DeviceClock(self._streams)
        return PendingOutcome(self._clock.watch(events, failed), host, failed)

    def logprob_count(self, row: int) -> int | None:
        """Return how many logprobs the request in `row` wants for each token. None: none."""
        return self._logprob_counts.get(row)

    def _to_host(self, plan: StepPlan, draws: Draws) -> Draws:
        slot = self._ring[plan.step % TURNS]
        count = len(draws.token_ids)
        token_ids, finite = slot.token_ids[:count], slot.finite[: len(draws.finite)]
        token_ids.copy_(draws.token_ids, non_blocking=True)
        finite.copy_(draws.finite, non_blocking=True)
        logprobs = draws.logprobs
        return Draws(
            token_ids,
            finite,
            None
            if logprobs is None
            else DrawLogprobs(_pinned(logprobs.sampled), _pinned(logprobs.top_ids), _pinned(logprobs.top)),
            None if draws.counts is None else _pinned(draws.counts),
            None if draws.proposed is None else _pinned(draws.proposed),
        )

    def trace(self, timeline: Timeline) -> None:
        self._executor = TracedExecutor(self._executor, CudaSpans(timeline, self._stream))

    def devices(self) -> list[DeviceMemory]:
        found = []
        for stream in self._streams:
            free, total = torch.cuda.mem_get_info(stream.device)
            name = torch.cuda.get_device_name(stream.device)
            found.append(DeviceMemory(str(stream.device), name, total - free, total))
        return found

    def close(self) -> None:
        with ExitStack() as stack:  # synchronising a lost device raises; the rest must still be closed
            # Drops the model, the KV pool and the graphs, even if a caller keeps the engine.
            stack.callback(vars(self).pop, "_executor", None)
            stack.callback(self._executor.close)
            if self._clock is not None:
                stack.callback(self._clock.close)
            for stream in self._streams:
                stream.synchronize()


def _pinned(tensor: Tensor) -> Tensor:
    """Enqueue a copy into pinned memory and return it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

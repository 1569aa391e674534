"""The interface of runners, which launch steps and return their results, and the runner for CPUs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.cache.kv import KVPool, SlidingLayers
from aengine.cache.states import StatePool, StateRoom
from aengine.cache.windows import WindowRoom
from aengine.config import EngineConfig
from aengine.model.decoder import Decoder
from aengine.runtime.device import ForwardThreads
from aengine.runtime.speculation.base import Kept, Proposer, ProposerChoice, ProposerParts, tap_states
from aengine.runtime.step.cells import StepCells, StepShape, describe, host_lens, resolve
from aengine.runtime.step.executor import Executor, Forwarded, HeadInputs, Outcome, TokenPass
from aengine.runtime.step.images import ImageEncoder, make_encoder
from aengine.runtime.step.pooling import pool_chunks
from aengine.runtime.step.results import read_outcome
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.scoring import score_chunks
from aengine.runtime.step.sharded_draws import draw_from_shards
from aengine.runtime.step.verdict import DraftedRows, Sample, draw_in_rounds, verify
from aengine.runtime.traced import HostSpans, TracedExecutor
from aengine.sampling.sampler import Draws, Kind, Sampler
from aengine.sampling.upload import upload
from aengine.step_plan import StepPlan, StepResult
from aengine.timeline import Timeline
from aengine.types import DeviceMemory

# Returns a context in which tensors of the device are allocated from a pool.
PoolContext = Callable[[torch.device], AbstractContextManager[object]]


class LaunchedStep(Protocol):
    """A step in flight."""

    plan: StepPlan

    def draw(self, masks: NDArray[np.int32] | None) -> None:
        """Enqueue the draws of a step whose plan is `structured`. Call it once, before the next launch.

        masks [structured draws, ceil(vocab / 32)] int32: bit masks of the allowed tokens, in the order of the draws.
        None: the draws will be ignored, because the step is dropped.
        """
        ...

    async def result(self) -> StepResult:
        """Wait for the step without blocking the event loop. Raises the step's error, if it failed."""
        ...


class Runner(Protocol):
    """Runs steps on the model's devices."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step after all earlier steps, and return at once.

        If its plan is `structured`, only the forward pass is enqueued. `LaunchedStep.draw` enqueues the draws.
        """
        ...

    def trace(self, timeline: Timeline) -> None:
        """Record in the timeline when the device is busy. Call it before the first launch."""
        ...

    def devices(self) -> list[DeviceMemory]:
        """Return the GPUs of all ranks. The list is empty if steps run on the CPU."""
        ...

    def close(self) -> None:
        """Wait for steps in flight, then free the model, the KV pool and all other memory of the device."""
        ...


class StepExecutor:
    """Runs steps in order on one rank: updates rows, runs the forward pass, draws tokens, copies pages and states."""

    def __init__(
        self,
        decoder: Decoder,
        kv: KVPool,
        sampler: Sampler,
        rows: Rows,
        states: StatePool | None = None,
        proposer: Proposer | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """Args:
        states: The pool of a model with recurrent layers.
        proposer: Drafts tokens for the next step. None: no step verifies drafts.
        images: Computes the embeddings of images. None: the model takes none.
        """
        self._states = states
        self._proposer = proposer
        self._images = images
        self.kv = kv
        self._decoder = decoder
        self._sampler = sampler
        self._rows = rows

    @classmethod
    def make(
        cls,
        config: EngineConfig,
        decoder: Decoder,
        num_pages: int,
        max_model_len: int,
        states: StateRoom | None,
        windows: WindowRoom | None,
        speculation: ProposerChoice,
        use_kernels: bool,
        pools: PoolContext = nullcontext,
    ) -> Self:
        """Make an executor with rows, a KV pool and a sampler on the decoder's device.

        Args:
            states: For a model with recurrent layers.
            windows: For a model whose layers with a window have pages of their own.
            use_kernels: As for `Sampler`.
            pools: Gives the context in which KV pools and states are allocated.
        """
        model, device, most_drafts = decoder.config, decoder.device, speculation.most_drafts
        with pools(device):
            sliding = None if windows is None else SlidingLayers(model.sliding, windows.num_pages)
            kv = KVPool(model.kv_shape(config.page_size, decoder.kv_dtype), num_pages, device, sliding)
            pool = None if states is None else StatePool(states, device)
            images = make_encoder(config, decoder)
        rows = Rows(
            config.max_num_seqs,
            -(-max_model_len // config.page_size),
            device,
            adapters=decoder.adapters is not None,
            windows=windows is not None,
            near_shift=decoder.near_shift,
            most_drafts=most_drafts,
            recurrent=states is not None,
            images=model.shifts_positions,
        )
        sampler = Sampler(rows.count, model.vocab_size, device, rows.count * (1 + most_drafts), use_kernels)
        proposer = speculation.make(ProposerParts(decoder, kv, sampler, rows))
        return cls(decoder, kv, sampler, rows, pool, proposer, images)

    def execute(self, plan: StepPlan) -> Outcome:
        """Enqueue (GPU) or compute (CPU) a step. The results stay on the device."""
        forwarded = self.forward(plan)
        return forwarded.outcome(self.draw(forwarded))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Forwarded:
        """Run the first half of a step: everything before its draws."""
        rows = self._rows
        self._begin(plan)
        passed = self._pass(plan)
        rows.advance(plan)
        self._copy_states(plan)
        scores = score_chunks(plan, self._scoring_head(passed), rows)
        hidden = passed.hidden if passed.wanted is None else passed.hidden.index_select(0, passed.wanted)
        row_list, draw_rows = plan.draw_rows, passed.draw_rows
        draws = len(row_list)
        pools = pool_chunks(plan, hidden[draws:], self._decoder, rows) if plan.pooled else None
        logits, sharded = None, self._draws_from_shards(plan, row_list)
        if draws:
            adapters = None
            if passed.adapted and rows.adapter is not None and self._decoder.adapts_logits:
                adapters = rows.adapter[draw_rows]
            head = self._decoder.shard_logits if sharded else self._decoder.logits
            logits = head(hidden[:draws], adapters)
        positions = passed.draw_positions
        return Forwarded(
            plan, logits, row_list, draw_rows, positions, scores, passed.sums, pools, sharded, passed.inputs
        )

    def _begin(self, plan: StepPlan) -> None:
        """Do what precedes the forward pass. A row may be new although the step has no tokens of it."""
        if self._images is not None:
            self._images.advance(plan)
        if plan.new_rows:
            self._rows.admit(plan.new_rows)
            self._sampler.set_rows(plan.new_rows)
            if self._proposer is not None:
                self._proposer.admit(plan.new_rows)
        self._rows.grow(plan.new_pages, plan.new_window_pages)
        if self._states is not None:
            self._states.copy(plan.state_loads)

    def rehearse_images(self, begins: bool) -> None:
        """Begin or end steps whose embeddings of images are undefined."""
        if self._images is not None:
            self._images.rehearsing = begins
            self._images.forget()

    def _pass(self, plan: StepPlan) -> TokenPass:
        """Run the decoder over the step's tokens."""
        rows, recurrent = self._rows, self._states is not None
        shape = StepShape.of_plan(plan)
        numbers = describe(plan, shape, rows.padding, limit=1, recurrent=recurrent)
        cells = StepCells.over(upload(numbers, rows.device), shape, recurrent)
        query_lens, context_lens = host_lens(plan, rows.lengths)
        adapted = rows.has_adapters(plan)
        width = -(-max(context_lens) // self.kv.page_size)
        tensors = resolve(cells, shape, rows, self.kv.page_size, adapted, width)
        tensors.query_lens, tensors.context_lens = query_lens, context_lens
        if self._images is not None:
            tensors.positions, tensors.images, tensors.mutual = self._images.place(plan, tensors.positions)
            if tensors.images is not None:
                tensors.token_ids = tensors.token_ids.index_fill(0, tensors.images.at, self._images.fill)
        # In a pure decode every token draws, in order. Scores need the hidden states of all tokens.
        taps = None if self._proposer is None or not plan.is_read else self._proposer.taps
        all_states = taps is not None and not taps.layers and not taps.tokens_only
        if not plan.prefill or plan.scoring or all_states:
            tensors.wanted = None
        # A step without chunks needs no sums: every token draws, and each draw reports whether its logits are finite.
        sums = torch.empty(plan.num_tokens, dtype=torch.float32, device=rows.device) if plan.prefill else None
        draws = len(plan.draw_rows)
        tapped = tap_states(taps, plan.num_tokens, self._decoder)
        hidden = tensors.forward(self._decoder, self.kv, self._states, sums, taps=tapped)
        inputs = None
        if taps is not None:
            states = hidden if tapped is None else tapped.states
            tensors.mutual = None  # a draft head attends causally
            # A head has one position for each token. The time is that of text, also for the tokens after an image.
            positions = tensors.positions if tensors.positions.dim() == 1 else tensors.positions[0]
            inputs = HeadInputs(tensors.token_ids, cells.wanted, positions, tensors.batch(), states)
        return TokenPass(
            hidden=hidden,
            wanted=cells.wanted if plan.prefill and (plan.scoring or all_states) else None,
            draw_rows=cells.draw_rows[:draws],
            draw_positions=tensors.next_positions[:draws],
            sums=sums,
            adapted=adapted,
            token_adapters=tensors.adapters,
            inputs=inputs,
        )

    def _scoring_head(self, passed: TokenPass) -> Callable[[slice], Tensor]:
        """Return a function from a slice of the step's tokens to their logits. It needs hidden states of all tokens."""
        adapters = passed.token_adapters if self._decoder.adapts_logits else None
        return lambda part: self._decoder.logits(passed.hidden[part], None if adapters is None else adapters[part])

    @torch.inference_mode()
    def draw(self, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> Draws | None:
        """Run the second half: draw, store the drawn ids as the rows' last tokens, verify drafts, and make new ones.

        masks: as `Sampler.sample` takes them.
        """
        draws, drafted = None, DraftedRows.of_plan(forwarded.plan, self._rows.device)
        if forwarded.logits is not None:
            draws = self._draw(forwarded.logits, forwarded, drafted, masks)
        if self._proposer is not None and forwarded.plan.is_read:
            kept = None if draws is None else Kept.of_step(forwarded.rows, draws, drafted)
            self._proposer.propose(forwarded.plan, kept, self._rows, forwarded.inputs)
            if draws is not None and kept is not None and forwarded.plan.structured:
                # The masks of the next step depend on the drafts.
                draws.proposed = self._rows.drafts(kept.rows, forwarded.plan.proposals)
        self._copy_pages(forwarded.plan)
        return draws

    def _draw(
        self, logits: Tensor, forwarded: Forwarded, drafted: DraftedRows | None, masks: NDArray[np.int32] | None
    ) -> Draws:
        """Draw, verify drafts, and store the rows' last tokens."""
        if forwarded.sharded:
            rows, positions = forwarded.rows, forwarded.positions
            draws = draw_from_shards(self._decoder, self._sampler, logits, rows, positions)
        elif drafted is not None and self._sampler.remembers(forwarded.row_list):
            sample = self._sample_places(logits, forwarded, masks)
            draws = draw_in_rounds(drafted, len(forwarded.row_list), self._rows, sample)
        else:
            draws = self._sample(logits, forwarded, masks)
        self._rows.last_token[forwarded.rows] = draws.token_ids
        if drafted is not None:
            verify(drafted, draws, self._rows)
        return draws

    def replays(self, plan: StepPlan) -> bool:
        return False

    def close(self) -> None:
        """Do nothing: there is no worker."""

    def _draws_from_shards(self, plan: StepPlan, rows: list[int]) -> bool:
        """Return whether each rank draws from its part of the vocabulary. Structured steps do not: they have masks."""
        return self._decoder.ranks is not None and not plan.structured and self._sampler.kind(rows) is Kind.SIMPLE

    def _sample(self, logits: Tensor, draws: Forwarded, masks: NDArray[np.int32] | None) -> Draws:
        return self._sampler.sample(logits.float(), draws.row_list, draws.rows, draws.positions, masks)

    def _sample_places(self, logits: Tensor, draws: Forwarded, masks: NDArray[np.int32] | None) -> Sample:
        """Return a function that draws some places of a step."""
        structured = {place: i for i, place in enumerate(self._sampler.structured(draws.row_list))}

        def sample(places: list[int], counted: Tensor | None) -> Draws:
            index = self._rows.upload(places)
            own = None if masks is None else masks[[structured[place] for place in places if place in structured]]
            rows = [draws.row_list[place] for place in places]
            chosen, at = draws.rows.index_select(0, index), draws.positions.index_select(0, index)
            return self._sampler.sample(logits.index_select(0, index).float(), rows, chosen, at, own, counted)

        return sample

    def _copy_states(self, plan: StepPlan) -> None:
        if self._states is not None:
            self._states.copy(plan.state_copies)

    def _copy_pages(self, plan: StepPlan) -> None:
        for kv, copies in ((self.kv, plan.page_copies), (self.kv.sliding, plan.window_copies)):
            if copies and kv is not None:
                pairs = self._rows.upload([page for copy in copies for page in copy])
                source, destination = pairs.view(-1, 2).unbind(1)
                kv.copy_pages(source, destination)


EnqueueDraws = Callable[[NDArray[np.int32] | None], asyncio.Future[StepResult]]


class CpuStep:
    """`LaunchedStep` on the CPU. The worker thread runs a structured step as two jobs."""

    def __init__(self, plan: StepPlan, future: asyncio.Future[StepResult] | EnqueueDraws) -> None:
        self.plan = plan
        self._future = future  # of a structured step: before its draws are enqueued, a function that enqueues them

    def draw(self, masks: NDArray[np.int32] | None) -> None:
        if not isinstance(self._future, asyncio.Future):
            self._future = self._future(masks)

    async def result(self) -> StepResult:
        if not isinstance(self._future, asyncio.Future):
            raise RuntimeError(f"the draws of step {self.plan.step} were never enqueued")
        return await self._future


class CpuRunner:
    """Runs steps in order in one worker thread, so that the loop keeps serving meanwhile."""

    def __init__(self, executor: Executor, threads: ForwardThreads) -> None:
        self._executor = executor
        self._threads = threads
        self._logprob_counts: dict[int, int | None] = {}  # by row; used in the worker thread only
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aengine-forward")

    def launch(self, plan: StepPlan) -> CpuStep:
        loop = asyncio.get_running_loop()
        if not plan.structured:
            return CpuStep(plan, loop.run_in_executor(self._worker, self._run, plan))
        forwarded = self._worker.submit(self._forward, plan)
        return CpuStep(plan, lambda masks: loop.run_in_executor(self._worker, self._draw, plan, forwarded, masks))

    def _run(self, plan: StepPlan) -> StepResult:
        return self._finish(plan, self._forward(plan))

    def _forward(self, plan: StepPlan) -> Forwarded:
        for new in plan.new_rows:
            self._logprob_counts[new.row] = new.params.logprobs
        # OpenMP has one thread count for each calling thread, so it is set in the thread that computes.
        torch.set_num_threads(self._threads.for_step(plan.num_tokens))
        return self._executor.forward(plan)

    def _draw(self, plan: StepPlan, forwarded: Future[Forwarded], masks: NDArray[np.int32] | None) -> StepResult:
        # The worker has finished the forward pass. If it failed, this call raises its error.
        return self._finish(plan, forwarded.result(), masks)

    def _finish(self, plan: StepPlan, forwarded: Forwarded, masks: NDArray[np.int32] | None = None) -> StepResult:
        outcome = forwarded.outcome(self._executor.draw(forwarded, masks))
        return read_outcome(outcome, self._logprob_counts.get, plan)

    def trace(self, timeline: Timeline) -> None:
        self._executor = TracedExecutor(self._executor, HostSpans(timeline))

    def devices(self) -> list[DeviceMemory]:
        return []

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._executor.close()
        vars(self).pop("_executor", None)  # drops the model and the KV pool

"""Launches steps and tells when they are done; everything above sees the same interface on every device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.model.decoder import Decoder
from aengine.runtime.batch import StepInputs, build_inputs
from aengine.runtime.device import ForwardThreads
from aengine.runtime.rows import Rows
from aengine.runtime.scoring import ChunkScores, read_scores, score_chunks
from aengine.sampling.sampler import Draws, Sampler
from aengine.types import RowLogprobs, StepPlan, StepResult


class LaunchedStep(Protocol):
    """A step on its way."""

    plan: StepPlan

    async def result(self) -> StepResult:
        """Wait for the step without blocking the loop. Raises what the step raised."""
        ...


class Runner(Protocol):
    """What the engine needs of a device."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue a step behind those launched before; returns at once."""
        ...

    def close(self) -> None:
        """Wait for what is still running and let go of the device."""
        ...


class StepExecutor:
    """Runs one step after the other: rows, forward pass, draws, feedback of the drawn ids, page copies."""

    def __init__(self, decoder: Decoder, kv: KVPool, sampler: Sampler, rows: Rows) -> None:
        self._decoder = decoder
        self._kv = kv
        self._sampler = sampler
        self._rows = rows
        self._scores: list[ChunkScores] = []

    def take_scores(self) -> list[ChunkScores]:
        """The prompt logprobs of the step that was executed last, on the device; once."""
        scores, self._scores = self._scores, []
        return scores

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Draws | None:
        """Enqueue (GPU) or compute (CPU) a step; None when nothing draws. The ids stay on the device."""
        rows = self._rows
        rows.admit(plan.new_rows)
        self._sampler.set_rows(plan.new_rows)
        rows.grow(plan.new_pages)
        inputs = build_inputs(plan, rows, self._kv.page_size)
        hidden = self._decoder.forward(inputs.input_ids, inputs.positions, inputs.attention, self._kv)
        self._scores = score_chunks(plan, hidden, self._decoder.logits, rows.upload)
        draws = self._draw(hidden, inputs)
        self._advance(plan, inputs)
        if plan.page_copies:
            pairs = rows.upload([page for copy in plan.page_copies for page in copy])
            source, destination = pairs.view(-1, 2).unbind(1)
            self._kv.copy_pages(source, destination)
        return draws

    def _draw(self, hidden: Tensor, inputs: StepInputs) -> Draws | None:
        if not inputs.draw_row_list:
            return None
        if inputs.draw_tokens is not None:
            hidden = hidden[inputs.draw_tokens]
        logits = self._decoder.logits(hidden)
        draws = self._sampler.sample(logits, inputs.draw_row_list, inputs.draw_rows, inputs.draw_positions)
        self._rows.last_token[inputs.draw_rows] = draws.token_ids
        return draws

    def _advance(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Lengths grow by what was computed, on the device and on the host alike."""
        rows = self._rows
        seq_lens = inputs.attention.seq_lens.to(torch.int64)
        decodes = len(plan.decode)
        if decodes:
            rows.length[inputs.draw_rows[:decodes]] = seq_lens[:decodes]
            for row in plan.decode:
                rows.lengths[row] += 1
        if plan.prefill:
            rows.length[rows.upload([chunk.row for chunk in plan.prefill])] = seq_lens[decodes:]
            for chunk in plan.prefill:
                rows.lengths[chunk.row] = chunk.start + len(chunk.token_ids)


def read_draws(
    draws: Draws | None, asked: Callable[[int], int | None], plan: StepPlan, scores: Sequence[ChunkScores] = ()
) -> StepResult:
    """Copy what a finished step brought to the host. `asked(row)` says how many logprobs a row wants, if any."""
    prompts = read_scores(scores, plan)
    if draws is None:
        return StepResult(token_ids=[], finite=[], logprobs=None, scores=prompts)
    logprobs: list[RowLogprobs | None] | None = None
    if draws.logprobs is not None:
        sampled = draws.logprobs.sampled.tolist()
        top_ids = draws.logprobs.top_ids.tolist()
        top = draws.logprobs.top.tolist()
        logprobs = []
        for place, row in enumerate(plan.sampled_rows):
            count = asked(row)
            logprobs.append(
                None if count is None else RowLogprobs(sampled[place], top_ids[place][:count], top[place][:count])
            )
    return StepResult(draws.token_ids.tolist(), draws.finite.tolist(), logprobs, prompts)


class CpuStep:
    """A step in the worker thread."""

    def __init__(self, plan: StepPlan, future: asyncio.Future[StepResult]) -> None:
        self.plan = plan
        self._future = future

    async def result(self) -> StepResult:
        return await self._future


class CpuRunner:
    """Runs steps in one worker thread, in order, so that the loop keeps serving while a step computes."""

    def __init__(self, executor: StepExecutor, threads: ForwardThreads) -> None:
        self._executor = executor
        self._threads = threads
        self._logprobs: dict[int, int | None] = {}  # row -> what its owner asked for; worker thread only
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="aengine-forward")

    def launch(self, plan: StepPlan) -> CpuStep:
        loop = asyncio.get_running_loop()
        return CpuStep(plan, loop.run_in_executor(self._worker, self._run, plan))

    def _run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self._logprobs[new.row] = new.params.logprobs
        # OpenMP keeps its thread count per thread: it must be set in the one that computes.
        torch.set_num_threads(self._threads.of(plan.num_tokens))
        draws = self._executor.execute(plan)
        return read_draws(draws, self._logprobs.get, plan, self._executor.take_scores())

    def close(self) -> None:
        self._worker.shutdown(wait=True)

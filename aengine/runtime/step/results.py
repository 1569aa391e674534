"""Turns the outcome of a finished step into what the scheduler reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from torch import Tensor

from aengine.runtime.step.executor import Outcome
from aengine.runtime.step.pooling import read_pools
from aengine.runtime.step.scoring import read_scores
from aengine.step_plan import RowLogprobs, StepPlan, StepResult

T = TypeVar("T")


def read_outcome(outcome: Outcome, logprob_count: Callable[[int], int | None], plan: StepPlan) -> StepResult:
    """Copy the results of a finished step to the host.

    logprob_count: returns how many top logprobs the request in a row wants, or None if it wants no logprobs.
    """
    prompts = read_scores(outcome.scores, plan)
    chunks = _finite_chunks(outcome.sums, plan)
    pooled = read_pools(outcome.pools, plan)
    draws = outcome.draws
    if outcome.written is not None:
        token_ids, finite, counts = outcome.written.read()
        return StepResult(token_ids, finite, None, prompts, chunks, pooled, counts)
    if draws is None:
        return StepResult([], [], None, prompts, chunks, pooled)
    logprobs: list[RowLogprobs | None] | None = None
    if draws.logprobs is not None:
        sampled = draws.logprobs.sampled.tolist()
        top_ids = draws.logprobs.top_ids.tolist()
        top = draws.logprobs.top.tolist()
        logprobs = []
        for place, row in enumerate(plan.draw_rows):
            count = logprob_count(row)
            logprobs.append(
                None if count is None else RowLogprobs(sampled[place], top_ids[place][:count], top[place][:count])
            )
    token_ids = draws.token_ids.tolist()
    counts = []
    if draws.counts is not None:
        counts = _all_counts(draws.counts.tolist(), plan)
        token_ids = _kept(token_ids, counts, plan)
        logprobs = None if logprobs is None else _kept(logprobs, counts, plan)
    proposed = [] if draws.proposed is None else draws.proposed.tolist()
    return StepResult(token_ids, draws.finite.tolist(), logprobs, prompts, chunks, pooled, counts, proposed)


def _all_counts(drafted: list[int], plan: StepPlan) -> list[int]:
    """Return how many draws each row keeps, from those of rows with drafts."""
    before = len(plan.decode) - len(drafted)
    return [1] * before + drafted + [1] * (len(plan.sampled_rows) - len(plan.decode))


def _kept(values: list[T], counts: list[int], plan: StepPlan) -> list[T]:
    """Return the values of the draws that are kept. values: of all draws."""
    places = [1 + drafts for drafts in plan.drafts] + [1] * (len(counts) - len(plan.decode))
    starts = itertools.accumulate(places, initial=0)
    return [value for start, count in zip(starts, counts) for value in values[start : start + count]]


def _finite_chunks(sums: Tensor | None, plan: StepPlan) -> list[bool]:
    """Return whether each chunk's tokens have finite sums. [] means all of them have."""
    if sums is None or (finite := np.isfinite(sums.numpy(force=True))).all():
        return []
    ends = itertools.accumulate((len(chunk.token_ids) for chunk in plan.prefill), initial=plan.decode_tokens)
    return [bool(finite[start:end].all()) for start, end in itertools.pairwise(ends)]

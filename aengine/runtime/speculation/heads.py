"""Drafts with a head: a small model that reads the target's hidden states."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.model.drafting.base import DraftHead
from aengine.runtime.speculation.base import Kept, PagedProposer, choose
from aengine.runtime.speculation.runs import one_token_runs
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import StepPlan


class HeadProposer(PagedProposer):
    """Runs a draft head over every token, and then once for each further draft."""

    def __init__(self, head: DraftHead, kv: KVPool, sampler: Sampler, table_length: int) -> None:
        """kv: The pool of the target and of the head. sampler: The target's.
        table_length: The number of rows of the tables of rotations.
        """
        super().__init__(head.name, head.taps)
        self._head = head
        self._kv = kv
        self._sampler = sampler
        self._table_length = table_length

    def _draft(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs) -> Tensor | None:
        next_ids = self._next_ids(plan, kept, rows, inputs)
        last = next_ids[:0]
        if kept is not None and plan.proposals:
            last = kept.places if inputs.wanted is None else inputs.wanted.index_select(0, kept.places)
        drafted = self._head.forward(next_ids, inputs.states, inputs.positions, inputs.batch, self._kv, last)
        if kept is None or not plan.proposals:
            return None
        # positions[:, i] are those of row i's drafts. The draft at p comes from the run over the state at p - 2.
        columns = torch.arange(1, plan.proposals + 1, device=rows.device)
        positions = rows.length.index_select(0, kept.rows) + columns[:, None]
        batches = []
        if plan.proposals > 1:
            batches = one_token_runs(self._kv, positions[1:] - 2, kept.rows, rows, plan, self._table_length)
        drafts = [choose(self._head, drafted.hidden, kept.rows, positions[0], self._sampler)]
        for of_draft, (rotary, batch) in zip(positions[1:], batches, strict=True):
            drafted = self._head.forward(drafts[-1], drafted.states, rotary, batch, self._kv, recycled=True)
            drafts.append(choose(self._head, drafted.hidden, kept.rows, of_draft, self._sampler))
        return torch.stack(drafts)

    def _next_ids(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs) -> Tensor:
        """Return the id after each token of the step, [tokens] int64. After refused drafts it may be any id."""
        if kept is not None and inputs.wanted is None:
            return kept.drawn
        next_ids = inputs.token_ids.roll(-1)
        ends = itertools.accumulate((len(chunk.token_ids) for chunk in plan.prefill), initial=plan.decode_tokens)
        unfinished = [(end - 1, chunk.next_id) for end, chunk in zip(itertools.islice(ends, 1, None), plan.prefill)]
        unfinished = [(token, next_id) for token, next_id in unfinished if next_id >= 0]
        if unfinished:
            tokens, ids = rows.upload([value for pair in unfinished for value in pair]).view(-1, 2).unbind(1)
            next_ids[tokens] = ids
        if kept is not None and inputs.wanted is not None:
            next_ids[inputs.wanted[: len(kept.drawn)]] = kept.drawn
        return next_ids

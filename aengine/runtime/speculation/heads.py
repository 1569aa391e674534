"""Drafts with a head that reads the target's hidden states, and the id of the token after each of them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.model.drafting.base import DraftHead
from aengine.model.drafting.eagle3 import Eagle3Head
from aengine.runtime.speculation.base import Kept, PagedProposer, choose
from aengine.runtime.speculation.runs import block_run, one_token_runs, prepared_drafts
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
        first = choose(self._head, drafted.hidden, kept.rows, positions[0], self._sampler)
        if plan.proposals == 1:
            return first[None]
        return torch.cat((first[None], self._draft_more(first, drafted.states, positions[1:], kept.rows, rows, plan)))

    def _draft_more(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, draw_rows: Tensor, rows: Rows, plan: StepPlan
    ) -> Tensor:
        """Return the drafts after the first, [drafts, n] int64.

        token_ids: [n] int64, the first drafts. states: [n, width], of the run that made them. positions: [drafts, n].
        """
        drafts = []
        runs = one_token_runs(self._kv, positions - 2, draw_rows, rows, plan, self._table_length)
        for of_draft, (rotary, batch) in zip(positions, runs, strict=True):
            drafted = self._head.forward(token_ids, states, rotary, batch, self._kv, recycled=True)
            token_ids, states = choose(self._head, drafted.hidden, draw_rows, of_draft, self._sampler), drafted.states
            drafts.append(token_ids)
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


class ParallelProposer(HeadProposer):
    """Runs a P-EAGLE head over every token, and then once for all further drafts.

    The second run reads masks. It has as many as `prepared_drafts` says.
    """

    def __init__(self, head: Eagle3Head, mask_id: int, kv: KVPool, sampler: Sampler, table_length: int) -> None:
        """mask_id: Of the head. The others are those of `HeadProposer`."""
        super().__init__(head, kv, sampler, table_length)
        self._masked = head
        self._mask_id = mask_id

    def _draft_more(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, draw_rows: Tensor, rows: Rows, plan: StepPlan
    ) -> Tensor:
        """See `HeadProposer._draft_more`. Masks read neither the first drafts nor their states."""
        head, (drafts, n) = self._masked, positions.shape
        count = prepared_drafts(plan.proposals, rows.most_drafts) - 1
        rotary, batch = block_run(
            self._kv, positions[0] - 2, count, draw_rows, rows, plan, self._table_length, causal=True
        )  # fmt: skip
        masks = torch.full((n * count,), self._mask_id, device=rows.device)
        wanted = torch.arange(n * count, device=rows.device).view(n, count)[:, :drafts].T.reshape(-1)
        drafted = head.forward(masks, head.mask_states(n * count), rotary, batch, self._kv, wanted, recycled=True)
        of_drafts = positions.reshape(-1)
        return choose(head, drafted.hidden, draw_rows.repeat(drafts), of_drafts, self._sampler).view(drafts, n)

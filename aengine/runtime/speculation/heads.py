"""Drafts with a head: a small model that reads the target's hidden states."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.model.drafting.base import Drafted, DraftHead, Taps
from aengine.runtime.speculation.base import Kept
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import NewRow, StepPlan


class HeadProposer:
    """`Proposer` that runs a draft head over every token, and then once for each further draft."""

    def __init__(self, head: DraftHead, kv: KVPool, sampler: Sampler, table_length: int) -> None:
        """kv: The pool of the target and of the head. sampler: The target's.
        table_length: The number of rows of the tables of rotations.
        """
        self.name = head.name
        self.taps: Taps | None = head.taps
        self._head = head
        self._kv = kv
        self._sampler = sampler
        self._table_length = table_length

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Do nothing: pages hold all that the head knows of a row."""

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        if inputs is None:
            raise RuntimeError("a draft head needs the hidden states of the step")
        next_ids = self._next_ids(plan, kept, rows, inputs)
        last = next_ids[:0]
        if kept is not None and plan.proposals:
            last = kept.places if inputs.wanted is None else inputs.wanted.index_select(0, kept.places)
        drafted = self._head.forward(next_ids, inputs.states, inputs.positions, inputs.batch, self._kv, last)
        if kept is None or not plan.proposals:
            return
        # positions[:, i] are those of row i's drafts. The draft at p comes from the run over the state at p - 2.
        columns = torch.arange(1, plan.proposals + 1, device=rows.device)
        positions = rows.length.index_select(0, kept.rows) + columns[:, None]
        batches = []
        if plan.proposals > 1:
            batches = one_token_runs(self._kv, positions[1:] - 2, kept.rows, rows, plan, self._table_length)
        drafts = [self._choose(drafted, kept.rows, positions[0])]
        for of_draft, (rotary, batch) in zip(positions[1:], batches, strict=True):
            drafted = self._head.forward(drafts[-1], drafted.states, rotary, batch, self._kv, recycled=True)
            drafts.append(self._choose(drafted, kept.rows, of_draft))
        rows.next_tokens[1 : plan.proposals + 1].index_copy_(1, kept.rows, torch.stack(drafts))

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

    def _choose(self, drafted: Drafted, rows: Tensor, positions: Tensor) -> Tensor:
        """Return a draft of each row, [n] int64.

        positions: [n] int64, of the drafts. A draft has the noise that the target will have at its position, so that a
        row with a temperature accepts more drafts.
        """
        logits, token_ids = self._head.logits(drafted.hidden), self._head.token_ids
        if token_ids is None:
            return self._sampler.draw_simple(logits, rows, positions).token_ids
        return token_ids.index_select(0, logits.argmax(dim=-1))


def one_token_runs(
    kv: KVPool, positions: Tensor, draw_rows: Tensor, rows: Rows, plan: StepPlan, table_length: int
) -> list[tuple[Tensor, AttentionBatch]]:
    """Return the rotary positions and the sequences of runs, each over one token of each row.

    All are computed at once, because each operation is a launch. positions: [runs, n] int64, of the tokens.
    draw_rows: [n] int64. Drafts may reach beyond the longest sequence: rotary positions stay below `table_length`.
    """
    page_size, (runs, n) = kv.page_size, positions.shape
    limit = rows.page_table.shape[1] * page_size
    inside = positions.clamp(max=limit - 1)
    flat, of_all = inside.reshape(-1), draw_rows.repeat(runs)
    slots = rows.slots(of_all, flat, page_size).view(runs, n).masked_fill_(positions >= limit, 0)
    rotary = rows.rotary_positions(of_all, flat).clamp(max=table_length - 1).view(runs, n)
    lens = (inside + 1).to(torch.int32)
    most = max(plan.contexts, default=0)
    most = max(most, *(chunk.start + len(chunk.token_ids) for chunk in plan.prefill), 0) + plan.proposals
    width = min(-(-most // page_size), rows.page_table.shape[1])
    batch = AttentionBatch(
        slots=slots[0],
        page_table=rows.page_table[:, :width].index_select(0, draw_rows),
        seq_lens=lens[0],
        query_starts=torch.arange(n + 1, dtype=torch.int32, device=rows.device),
        num_decodes=n,
        query_lens=[1] * n,
        context_lens=[min(most, limit)] * n,
    )
    return [(rotary[i], replace(batch, slots=slots[i], seq_lens=lens[i], plans={})) for i in range(runs)]

"""Drafts with a head that drafts all tokens of a block in one run."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.cache.kv import KVPool
from aengine.model.drafting.dflash import DFlashHead
from aengine.runtime.speculation.base import Kept, PagedProposer, choose
from aengine.runtime.speculation.runs import block_run, prepared_drafts
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import StepPlan


class BlockProposer(PagedProposer):
    """Shows a head the states of every token, and then makes all drafts in one run.

    A block is a row's last token, and a mask for each draft. It has as many masks as `prepared_drafts` says.
    """

    def __init__(self, head: DFlashHead, kv: KVPool, sampler: Sampler, table_length: int) -> None:
        """kv: The pool of the target and of the head. sampler: The target's.
        table_length: The number of rows of the tables of rotations.
        """
        super().__init__(head.name, head.taps)
        self._head = head
        self._kv = kv
        self._sampler = sampler
        self._table_length = table_length

    def _draft(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs) -> Tensor | None:
        head, drafts = self._head, plan.proposals
        head.observe(inputs.states, inputs.positions, inputs.batch.slots, self._kv)
        if kept is None or not drafts:
            return None
        n, count = len(kept.rows), 1 + prepared_drafts(drafts, rows.most_drafts)
        first = rows.length.index_select(0, kept.rows)
        rotary, batch = block_run(
            self._kv, first, count, kept.rows, rows, plan, self._table_length, causal=head.is_causal
        )  # fmt: skip
        token_ids = torch.full((n, count), head.mask_id, device=rows.device)
        token_ids[:, 0] = rows.last_token.index_select(0, kept.rows)
        columns = torch.arange(1, 1 + drafts, device=rows.device)
        masks = (torch.arange(0, n * count, count, device=rows.device)[:, None] + columns).view(-1)
        hidden = head.draft(token_ids.view(-1), rotary, batch, self._kv, masks)
        positions = (first[:, None] + columns).view(-1)
        return choose(head, hidden, kept.rows.repeat_interleave(drafts), positions, self._sampler).view(n, drafts).T

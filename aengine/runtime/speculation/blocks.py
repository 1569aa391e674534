"""Drafts with a head that drafts all tokens of a block in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.model.drafting.base import Taps
from aengine.model.drafting.dflash import DFlashHead
from aengine.runtime.speculation.base import Kept
from aengine.runtime.step.executor import HeadInputs
from aengine.runtime.step.rows import Rows
from aengine.sampling.sampler import Sampler
from aengine.step_plan import NewRow, StepPlan


@dataclass(slots=True)
class _Blocks:
    """A block of each row: the row's last token, and a mask for each draft. Tokens are in the order of the rows."""

    token_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, as `Decoder.forward` takes them
    batch: AttentionBatch  # each token is a decode
    masks: Tensor  # [drafts] int64: the tokens at which a draft is made
    mask_rows: Tensor  # [drafts] int64: the row of each draft
    mask_positions: Tensor  # [drafts] int64: the position of each draft in its sequence


class BlockProposer:
    """`Proposer` that shows a head the states of every token, and then makes all drafts in one run."""

    def __init__(self, head: DFlashHead, kv: KVPool, sampler: Sampler) -> None:
        """kv: The pool of the target and of the head. sampler: The target's."""
        self.name = head.name
        self.taps: Taps | None = head.taps
        self._head = head
        self._kv = kv
        self._sampler = sampler

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Do nothing: pages hold all that the head knows of a row."""

    def propose(self, plan: StepPlan, kept: Kept | None, rows: Rows, inputs: HeadInputs | None) -> None:
        if inputs is None:
            raise RuntimeError("a draft head needs the hidden states of the step")
        self._head.observe(inputs.states, inputs.positions, inputs.batch.slots, self._kv)
        if kept is None or not plan.proposals:
            return
        blocks = self._make_blocks(plan, kept.rows, rows)
        hidden = self._head.draft(blocks.token_ids, blocks.positions, blocks.batch, self._kv, blocks.masks)
        drafts = self._choose(hidden, blocks.mask_rows, blocks.mask_positions).view(-1, plan.proposals)
        rows.next_tokens[1 : plan.proposals + 1].index_copy_(1, kept.rows, drafts.T)

    def _make_blocks(self, plan: StepPlan, row_index: Tensor, rows: Rows) -> _Blocks:
        """Return the blocks that follow these rows, [n] int64.

        A row may have no pages yet for the end of its block. Keys and values of tokens there go to page 0, and no token
        of the block sees them.
        """
        head, page_size, count = self._head, self._kv.page_size, 1 + plan.proposals
        columns = torch.arange(count, device=rows.device)
        first = rows.length.index_select(0, row_index).unsqueeze(1)
        positions = first + columns  # [n, count]
        most = max(plan.contexts, default=0)
        most = max(most, *(chunk.start + len(chunk.token_ids) for chunk in plan.prefill), 0) + count
        width = min(-(-most // page_size), rows.page_table.shape[1])
        table = rows.page_table[:, :width].index_select(0, row_index)
        held = (table != 0).sum(dim=1, keepdim=True) * page_size  # the places of each row's pages
        ends = positions + 1 if head.is_causal else first + count
        seq_lens = torch.minimum(ends, held).expand(-1, count)
        each, flat = row_index.repeat_interleave(count), positions.flatten()
        inside = torch.minimum(positions, held - 1).clamp_(min=0).flatten()
        slots = rows.slots(each, inside, page_size).masked_fill_(inside != flat, 0)
        token_ids = torch.full_like(positions, head.mask_id)
        token_ids[:, 0] = rows.last_token.index_select(0, row_index)
        tokens = len(flat)
        batch = AttentionBatch(
            slots=slots,
            page_table=table.repeat_interleave(count, dim=0),
            seq_lens=seq_lens.flatten().to(torch.int32),
            query_starts=torch.arange(tokens + 1, dtype=torch.int32, device=rows.device),
            num_decodes=tokens,
            query_lens=[1] * tokens,
            context_lens=[min(most, width * page_size)] * tokens,
        )
        return _Blocks(
            token_ids=token_ids.flatten(),
            positions=rows.rotary_positions(each, flat),
            batch=batch,
            masks=torch.arange(tokens, device=rows.device).view(-1, count)[:, 1:].flatten(),
            mask_rows=row_index.repeat_interleave(count - 1),
            mask_positions=positions[:, 1:].flatten(),
        )

    def _choose(self, hidden: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the drafts of rows at positions, [n] int64.

        A draft has the noise that the target will have at its position, so that a row with a temperature accepts more
        drafts.
        """
        logits, token_ids = self._head.logits(hidden), self._head.token_ids
        if token_ids is None:
            return self._sampler.draw_simple(logits.float(), rows, positions).token_ids
        return token_ids.index_select(0, logits.argmax(dim=-1))

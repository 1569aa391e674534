"""The sequences that a proposer's own runs read: one token of each row, or a block of tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan

# Each number of drafts needs graphs, and each size of a block needs variants of kernels.
DRAFTS = (1, 2, 4, 8, 16)


def draft_counts(most_drafts: int) -> list[int]:
    """Return the numbers of drafts that are prepared at start-up, ascending: `most_drafts` and some lower ones."""
    return sorted({*(drafts for drafts in DRAFTS if drafts < most_drafts), most_drafts} - {0})


def prepared_drafts(proposals: int, most_drafts: int) -> int:
    """Return the smallest number of `draft_counts` that is not below `proposals`."""
    return next(count for count in draft_counts(most_drafts) if count >= proposals)


def one_token_runs(
    kv: KVPool, positions: Tensor, draw_rows: Tensor, rows: Rows, plan: StepPlan, table_length: int
) -> list[tuple[Tensor, AttentionBatch]]:
    """Return the rotary positions and the sequences of runs, each over one token of each row.

    All are computed at once, because each operation is a launch. positions: [runs, n] int64, of the tokens.
    draw_rows: [n] int64. Drafts may reach beyond the longest sequence: rotary positions stay below `table_length`.
    """
    runs, n = positions.shape
    longest, table = _seen_pages(kv, draw_rows, rows, plan)
    slots, rotary = _places(kv, positions.reshape(-1), draw_rows.repeat(runs), rows, table_length)
    slots, rotary = slots.view(runs, n), rotary.view(runs, n)
    lens = (positions + 1).clamp(max=_limit(kv, rows)).to(torch.int32)
    batch = AttentionBatch(
        slots=slots[0],
        page_table=table,
        seq_lens=lens[0],
        query_starts=torch.arange(n + 1, dtype=torch.int32, device=rows.device),
        num_decodes=n,
        query_lens=[1] * n,
        context_lens=[longest] * n,
    )
    return [(rotary[i], replace(batch, slots=slots[i], seq_lens=lens[i], plans={})) for i in range(runs)]


def block_run(
    kv: KVPool,
    first: Tensor,
    count: int,
    draw_rows: Tensor,
    rows: Rows,
    plan: StepPlan,
    table_length: int,
    causal: bool,
) -> tuple[Tensor, AttentionBatch]:
    """Return the rotary positions and the sequences of a run over `count` tokens of each row.

    A row may have no pages yet for the end of its block. Keys and values of tokens there go to page 0.

    Args:
        first: [n] int64, the position of each row's first token.
        draw_rows: [n] int64.
        table_length: As in `one_token_runs`.
        causal: Whether a token sees the block's tokens only up to itself. If not, no token sees those without a page.
    """
    n = len(draw_rows)
    positions = (first[:, None] + torch.arange(count, device=rows.device)).view(-1)
    longest, table = _seen_pages(kv, draw_rows, rows, plan)
    slots, rotary = _places(kv, positions, draw_rows.repeat_interleave(count), rows, table_length)
    ends = (first + count).clamp(max=_limit(kv, rows))
    if not causal:
        ends = torch.minimum(ends, (table != 0).sum(dim=1) * kv.page_size)
    return rotary, AttentionBatch(
        slots=slots,
        page_table=table,
        seq_lens=ends.to(torch.int32),
        query_starts=torch.arange(0, n * count + 1, count, dtype=torch.int32, device=rows.device),
        num_decodes=n,
        query_lens=[count] * n,
        context_lens=[longest] * n,
        decode_queries=count,
        causal_decodes=causal,
    )


def _limit(kv: KVPool, rows: Rows) -> int:
    """Return how many tokens a row's page table has room for."""
    return rows.page_table.shape[1] * kv.page_size


def _seen_pages(kv: KVPool, draw_rows: Tensor, rows: Rows, plan: StepPlan) -> tuple[int, Tensor]:
    """Return an upper bound of the lengths with all drafts, and the page tables up to there, [n, pages] int32."""
    most = max(plan.contexts, default=0)
    most = max(most, *(chunk.start + len(chunk.token_ids) for chunk in plan.prefill), 0) + 1 + rows.most_drafts
    longest = min(most, _limit(kv, rows))
    return longest, rows.page_table[:, : -(-longest // kv.page_size)].index_select(0, draw_rows)


def _places(kv: KVPool, positions: Tensor, token_rows: Tensor, rows: Rows, table_length: int) -> tuple[Tensor, Tensor]:
    """Return slots and rotary positions of tokens, both [tokens] int64. positions, token_rows: [tokens] int64."""
    limit = _limit(kv, rows)
    inside = positions.clamp(max=limit - 1)
    slots = rows.slots(token_rows, inside, kv.page_size).masked_fill_(positions >= limit, 0)
    return slots, rows.rotary_positions(token_rows, inside).clamp(max=table_length - 1)

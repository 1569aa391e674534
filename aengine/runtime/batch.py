"""From a step plan to the tensors that the forward pass and the sampler read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.runtime.rows import Rows
from aengine.types import StepPlan


@dataclass(slots=True)
class StepInputs:
    """Decode rows come first, one token each, then the prefill chunks."""

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    attention: AttentionBatch
    draw_tokens: Tensor | None  # [draws] int64: whose hidden state each draw reads; None: all tokens, in order
    draw_row_list: list[int]
    draw_rows: Tensor  # [draws] int64
    draw_positions: Tensor  # [draws] int64: the place that the drawn token takes in its sequence


def build_inputs(plan: StepPlan, rows: Rows, page_size: int) -> StepInputs:
    """Gather a step's inputs: decode ids and positions from the device's rows, prefill ones from the plan."""
    device = rows.device
    decodes = len(plan.decode)
    row_list = plan.decode + [chunk.row for chunk in plan.prefill]
    row_index = torch.tensor(row_list, device=device)  # [seqs]
    context_lens = [rows.lengths[row] + 1 for row in plan.decode]
    context_lens += [chunk.start + len(chunk.token_ids) for chunk in plan.prefill]
    query_lens = [1] * decodes + [len(chunk.token_ids) for chunk in plan.prefill]
    width = -(-max(context_lens) // page_size)

    decode_rows = row_index[:decodes]
    decode_positions = rows.length[decode_rows]
    if not plan.prefill:
        input_ids = rows.last_token[decode_rows]
        positions = decode_positions
        token_rows = row_index
        seq_lens = decode_positions + 1
        draw_tokens = None
        draw_row_list, draw_rows, draw_positions = plan.decode, row_index, seq_lens
    else:
        known = [token for chunk in plan.prefill for token in chunk.token_ids]
        places = [place for chunk in plan.prefill for place in range(chunk.start, chunk.start + len(chunk.token_ids))]
        prefill_ids, prefill_positions = torch.tensor([known, places], device=device).unbind(0)
        input_ids = torch.cat((rows.last_token[decode_rows], prefill_ids))
        positions = torch.cat((decode_positions, prefill_positions))
        token_rows = torch.repeat_interleave(
            row_index, torch.tensor(query_lens, device=device), output_size=decodes + len(known)
        )
        ends = torch.tensor(context_lens[decodes:], device=device)
        seq_lens = torch.cat((decode_positions + 1, ends))
        draws = _prefill_draws(plan)
        draw_row_list = plan.sampled_rows
        draw_rows = torch.tensor(draw_row_list, device=device)
        draw_tokens = torch.tensor(list(range(decodes)) + [token for token, _ in draws], device=device)
        draw_positions = torch.cat((seq_lens[:decodes], torch.tensor([end for _, end in draws], device=device))).to(
            torch.int64
        )
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        attention=AttentionBatch(
            slots=rows.slots(token_rows, positions, page_size),
            page_table=rows.page_table[row_index, :width],
            seq_lens=seq_lens.to(torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            num_decodes=decodes,
            query_lens=query_lens,
            context_lens=context_lens,
        ),
        draw_tokens=draw_tokens,
        draw_row_list=draw_row_list,
        draw_rows=draw_rows,
        draw_positions=draw_positions,
    )


def _prefill_draws(plan: StepPlan) -> list[tuple[int, int]]:
    """For each draw of a prefill chunk: the index of the token that it reads, and the position it draws for."""
    draws: list[tuple[int, int]] = []
    token = len(plan.decode)
    for chunk in plan.prefill:
        token += len(chunk.token_ids)
        if chunk.samples:
            draws += [(token - 1, chunk.start + len(chunk.token_ids))] * (1 + len(chunk.forks))
    return draws

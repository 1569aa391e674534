"""From a step plan to the tensors that the forward pass and the sampler read."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.kernels.delta.base import StateBatch
from aengine.runtime.step.rows import Rows
from aengine.runtime.step.states import state_batch
from aengine.step_plan import StepPlan


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
    adapters: Tensor | None  # [tokens] int32: the places of their adapters; None: no token has one
    states: StateBatch | None = None  # where the model has recurrent layers


def build_inputs(plan: StepPlan, rows: Rows, page_size: int, recurrent: bool = False) -> StepInputs:
    """Gather a step's inputs: decode ids and positions from the device's rows, prefill ones from the plan.

    recurrent: whether the model has layers that keep states.
    """
    decodes = len(plan.decode)
    row_list = plan.decode + [chunk.row for chunk in plan.prefill]
    context_lens = [rows.lengths[row] + 1 for row in plan.decode]
    context_lens += [chunk.start + len(chunk.token_ids) for chunk in plan.prefill]
    query_lens = [1] * decodes + [len(chunk.token_ids) for chunk in plan.prefill]
    width = -(-max(context_lens) // page_size)
    starts = [0, *itertools.accumulate(query_lens)]
    row_index, query_starts = rows.upload(row_list), rows.upload(starts)
    row_adapters = rows.adapters_of(row_list)

    decode_rows = row_index[:decodes]
    decode_positions = rows.length[decode_rows]
    if not plan.prefill:
        input_ids = rows.last_token[decode_rows]
        positions = decode_positions
        token_row_index = row_index
        seq_lens = decode_positions + 1
        draw_tokens: Tensor | None = None
        draw_row_list, draw_rows, draw_positions = plan.decode, row_index, seq_lens
    else:
        draws = _prefill_draws(plan)
        draw_row_list = plan.sampled_rows
        known = [token for chunk in plan.prefill for token in chunk.token_ids]
        places = [place for chunk in plan.prefill for place in range(chunk.start, chunk.start + len(chunk.token_ids))]
        token_rows = [row for row, length in zip(row_list, query_lens, strict=True) for _ in range(length)]
        uploads = (
            known,
            places,
            token_rows,
            context_lens[decodes:],
            draw_row_list,
            [*range(decodes), *(token for token, _ in draws)],
            [end for _, end in draws],
        )
        prefill_ids, prefill_positions, token_row_index, ends, draw_rows, draw_tokens, draw_ends = rows.upload(
            [value for part in uploads for value in part]
        ).split([len(part) for part in uploads])
        input_ids = torch.cat((rows.last_token[decode_rows], prefill_ids))
        positions = torch.cat((decode_positions, prefill_positions))
        seq_lens = torch.cat((decode_positions + 1, ends))
        draw_positions = torch.cat((seq_lens[:decodes], draw_ends))
    attention = AttentionBatch(
        slots=rows.slots(token_row_index, positions, page_size),
        page_table=rows.page_table[row_index, :width],
        seq_lens=seq_lens.to(torch.int32),
        query_starts=query_starts.to(torch.int32),
        num_decodes=decodes,
        query_lens=query_lens,
        context_lens=context_lens,
    )
    if (table := rows.window_table) is not None:
        slots = rows.slots(token_row_index, positions, page_size, table)
        attention.sliding = attention.over(slots, table[row_index, :width])
    return StepInputs(
        input_ids=input_ids,
        positions=positions,
        attention=attention,
        draw_tokens=draw_tokens,
        draw_row_list=draw_row_list,
        draw_rows=draw_rows,
        draw_positions=draw_positions,
        adapters=None if row_adapters is None else row_adapters[token_row_index],
        states=state_batch(plan, positions, rows.upload) if recurrent else None,
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

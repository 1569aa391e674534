"""The reference implementation of `DecodeKernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.decodes.base import DecodeInputs, Verdict, empty_inputs


def begin(
    row_index: Tensor,
    drafts: Tensor,
    queries: int,
    next_tokens: Tensor,
    length: Tensor,
    page_table: Tensor,
    page_size: int,
    padding: int,
    turn: Tensor,
    turns: int,
    window_table: Tensor | None = None,
    out: DecodeInputs | None = None,
) -> DecodeInputs:
    n, windowed = len(row_index), window_table is not None
    out = out or empty_inputs(n, queries, page_table.shape[1], page_size, windowed, row_index.device)
    columns = torch.arange(queries, device=row_index.device)
    before = length[row_index][:, None]
    exists = columns <= drafts[:, None]
    positions = before + torch.minimum(columns, drafts[:, None])
    token_rows = row_index[:, None].expand(-1, queries)
    out.token_ids.view(n, queries).copy_(next_tokens[:queries, row_index].T)
    out.token_rows.view(n, queries).copy_(token_rows)
    out.positions.view(n, queries).copy_(positions)
    out.next_positions.view(n, queries).copy_(positions + 1)
    out.seq_lens.copy_(before[:, 0] + queries)
    kinds = ((page_table, out.slots, out.page_table), (window_table, out.window_slots, out.window_table))
    for table, slots, pages in kinds:
        if table is not None and slots is not None and pages is not None:
            of_tokens = torch.where(exists, table[token_rows, positions // page_size].long(), 0)
            slots.view(n, queries).copy_(of_tokens * page_size + (before + columns) % page_size)
            pages.zero_()
            pages[:, : table.shape[1]] = table[row_index]
    length[row_index] = torch.where(row_index == padding, 0, before[:, 0] + 1 + drafts)
    turn.copy_((turn + 1) % turns)
    return out


def end(
    row_index: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    finite: Tensor,
    next_tokens: Tensor,
    length: Tensor,
    written: Tensor,
    turn: Tensor,
    padding: int,
) -> Verdict:
    n = len(row_index)
    drawn, queries = token_ids.view(n, -1), len(token_ids) // max(n, 1)
    columns = torch.arange(queries, device=row_index.device)
    same = (drawn[:, :-1] == next_tokens[1:queries, row_index].T) & (columns[:-1] < drafts[:, None])
    accepted = same.long().cumprod(dim=1).sum(dim=1)
    refused = drafts - accepted
    kept_finite = (finite.view(n, -1) | (columns > accepted[:, None])).all(dim=1)
    real, last = row_index != padding, next_tokens[0]
    kept_last = drawn.gather(1, accepted[:, None])[:, 0]
    last.index_copy_(0, row_index, torch.where(real, kept_last, last[row_index]))
    length.index_add_(0, row_index, torch.where(real, -refused, 0))
    cells = written[turn, :n]
    cells[0, :, :queries] = torch.where(real[:, None], drawn, cells[0, :, :queries])
    cells[0, :, -1] = torch.where(real, torch.where(kept_finite, refused, ~refused), cells[0, :, -1])
    written[turn, :n] = cells
    first = torch.arange(n, device=row_index.device) * queries
    return Verdict(torch.where(real, accepted + 1, 0), first + accepted)

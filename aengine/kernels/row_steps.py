"""The first and the last kernel of a decode step: gather the inputs of rows, and store the draws in the rows."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.variants import keep_variants

BLOCK = 1024


@dataclass(slots=True)
class DecodeInputs:
    """The inputs of a decode step, in the order of the batch."""

    token_ids: Tensor  # [n] int64: the latest draws
    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64: page * page_size + offset of the positions
    seq_lens: Tensor  # [n] int32: positions + 1
    next_positions: Tensor  # [n] int64: positions + 1, of the tokens to draw
    page_table: Tensor  # [n, width] int32; only the entries below the row's length are set
    # slots and page_table of layers in the window group; None: there is no such group
    window_slots: Tensor | None = None
    window_table: Tensor | None = None


@keep_variants
@triton.jit(
    do_not_specialize_on_alignment=[
        "token_ids_ptr",
        "positions_ptr",
        "slots_ptr",
        "next_positions_ptr",
        "window_slots_ptr",
    ]
)
def _begin_kernel(
    row_index_ptr,  # [n] int64
    last_token_ptr,  # [rows] int64
    length_ptr,  # [rows] int64
    table_ptr,  # [rows, WIDTH] int32
    window_ptr,  # [rows, WIDTH] int32, with WINDOWED
    token_ids_ptr,
    positions_ptr,
    slots_ptr,
    seq_lens_ptr,
    next_positions_ptr,
    table_out_ptr,  # [n, WIDTH] int32
    window_slots_ptr,
    window_out_ptr,  # [n, WIDTH] int32
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PADDING: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(row_index_ptr + place)
    length = tl.load(length_ptr + row)
    page = tl.load(table_ptr + row * WIDTH + length // PAGE).to(tl.int64)
    tl.store(token_ids_ptr + place, tl.load(last_token_ptr + row))
    tl.store(positions_ptr + place, length)
    tl.store(slots_ptr + place, page * PAGE + length % PAGE)
    tl.store(seq_lens_ptr + place, (length + 1).to(tl.int32))
    tl.store(next_positions_ptr + place, length + 1)
    if row != PADDING:
        tl.store(length_ptr + row, length + 1)
    if WINDOWED:
        window_page = tl.load(window_ptr + row * WIDTH + length // PAGE).to(tl.int64)
        tl.store(window_slots_ptr + place, window_page * PAGE + length % PAGE)
    out = table_out_ptr + place.to(tl.int64) * WIDTH
    pages = (length // PAGE + 1).to(tl.int32)
    for start in range(0, pages, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < pages
        tl.store(out + columns, tl.load(table_ptr + row * WIDTH + columns, mask=inside, other=0), mask=inside)
        if WINDOWED:
            window_out = window_out_ptr + place.to(tl.int64) * WIDTH + columns
            tl.store(window_out, tl.load(window_ptr + row * WIDTH + columns, mask=inside, other=0), mask=inside)


def begin_decode(
    row_index: Tensor,
    last_token: Tensor,
    length: Tensor,
    page_table: Tensor,
    page_size: int,
    padding: int,
    window_table: Tensor | None = None,
) -> DecodeInputs:
    """Gather the inputs of rows, and increase their lengths by one. The padding row does not change.

    Args:
        row_index: [n] int64. Contains no row twice except `padding`.
        last_token, length: [rows] int64; every length is below width * page_size.
        page_table, window_table: [rows, width] int32, contiguous.
    """
    n, width = len(row_index), page_table.shape[1]
    token_ids, positions, slots, next_positions = torch.empty((4, n), dtype=torch.int64, device=row_index.device)
    seq_lens = torch.empty(n, dtype=torch.int32, device=row_index.device)
    table = torch.empty((n, width), dtype=torch.int32, device=row_index.device)
    windowed = window_table is not None
    window_slots, windows = (torch.empty_like(slots), torch.empty_like(table)) if windowed else (slots, table)
    if n:
        _begin_kernel[(n,)](
            row_index, last_token, length, page_table, window_table if windowed else page_table,
            token_ids, positions, slots, seq_lens, next_positions, table, window_slots, windows,
            WIDTH=width, PAGE=page_size, PADDING=padding, WINDOWED=windowed, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    inputs = DecodeInputs(token_ids, positions, slots, seq_lens, next_positions, table)
    return replace(inputs, window_slots=window_slots, window_table=windows) if windowed else inputs


@keep_variants
@triton.jit(do_not_specialize_on_alignment=["token_ids_ptr", "finite_ptr"])
def _end_kernel(
    row_index_ptr,  # [n] int64
    token_ids_ptr,  # [n] int64
    finite_ptr,  # [n] bool
    last_token_ptr,  # [rows] int64
    length_ptr,  # [rows] int64
    drawn_ptr,  # [rows, TURNS] int64
    PADDING: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
    place = tl.program_id(0)
    row = tl.load(row_index_ptr + place)
    if row != PADDING:
        token_id = tl.load(token_ids_ptr + place)
        length = tl.load(length_ptr + row)
        tl.store(last_token_ptr + row, token_id)
        tl.store(drawn_ptr + row * TURNS + length % TURNS, tl.where(tl.load(finite_ptr + place), token_id, ~token_id))


def end_decode(
    row_index: Tensor,
    token_ids: Tensor,
    finite: Tensor,
    last_token: Tensor,
    length: Tensor,
    drawn: Tensor,
    padding: int,
) -> None:
    """Store each row's draw as its next input and in `drawn` for the host. The padding row does not change.

    Args:
        row_index: [n] int64; contains no row twice except `padding`.
        token_ids: [n] int64, none negative.
        finite: [n] bool.
        last_token, length: [rows] int64.
        drawn: [rows, turns] int64, may be pinned host memory. The token, or ~token if the draw is not finite,
            is stored in column length % turns.
    """
    if len(row_index):
        overlap = launch_for(row_index.device).overlap
        _end_kernel[(len(row_index),)](
            row_index, token_ids, finite, last_token, length, drawn,
            PADDING=padding, TURNS=drawn.shape[1], OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip

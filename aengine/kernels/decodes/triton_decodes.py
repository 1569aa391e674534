"""`DecodeKernels` in Triton: one kernel for each operation, with one program for each row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from aengine.kernels.decodes.base import DecodeInputs, Verdict, empty_inputs
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants

BLOCK = 1024  # pages that are copied at once


@triton.jit
def _slots(table_ptr, positions, offsets, exists, PAGE: tl.constexpr):
    """Return the slots of positions, and for padding slots of page 0."""
    pages = tl.load(table_ptr + positions // PAGE, mask=exists, other=0).to(tl.int64)
    return pages * PAGE + offsets % PAGE


@keep_variants
@triton.jit(
    do_not_specialize_on_alignment=[
        "row_index_ptr", "drafts_ptr", "token_ids_ptr", "token_rows_ptr", "positions_ptr", "next_positions_ptr",
        "slots_ptr", "seq_lens_ptr", "table_out_ptr", "window_slots_ptr", "window_out_ptr",
    ]
)  # fmt: skip
def _begin_kernel(
    row_index_ptr,  # [n] int64
    drafts_ptr,  # [n] int64
    next_tokens_ptr,  # [.., ROWS] int64
    length_ptr,  # [ROWS] int64
    table_ptr,  # [ROWS, WIDTH] int32
    window_ptr,  # [ROWS, WIDTH] int32, with WINDOWED
    turn_ptr,  # [1] int64
    token_ids_ptr,  # [n * QUERIES] int64, as the next four
    token_rows_ptr,
    positions_ptr,
    next_positions_ptr,
    slots_ptr,
    seq_lens_ptr,  # [n] int32
    table_out_ptr,  # [n, OUT_WIDTH] int32
    window_slots_ptr,
    window_out_ptr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two >= QUERIES
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PADDING: tl.constexpr,
    TURNS: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(row_index_ptr + place)
    drafts = tl.load(drafts_ptr + place)
    length = tl.load(length_ptr + row)
    columns = tl.arange(0, COLUMNS)
    inside = columns < QUERIES
    exists = inside & (columns <= drafts)
    positions = length + tl.minimum(columns, drafts)
    offsets = length + columns
    out = place * QUERIES + columns
    token_ids = tl.load(next_tokens_ptr + columns * ROWS + row, mask=inside, other=0)
    tl.store(token_ids_ptr + out, token_ids, mask=inside)
    tl.store(token_rows_ptr + out, tl.zeros_like(positions) + row, mask=inside)
    tl.store(positions_ptr + out, positions, mask=inside)
    tl.store(next_positions_ptr + out, positions + 1, mask=inside)
    slots = _slots(table_ptr + row * WIDTH, positions, offsets, exists, PAGE)
    tl.store(slots_ptr + out, slots, mask=inside)
    tl.store(seq_lens_ptr + place, (length + QUERIES).to(tl.int32))
    if WINDOWED:
        window_slots = _slots(window_ptr + row * WIDTH, positions, offsets, exists, PAGE)
        tl.store(window_slots_ptr + out, window_slots, mask=inside)
    if row != PADDING:
        tl.store(length_ptr + row, length + 1 + drafts)
    if place == 0:
        tl.store(turn_ptr, (tl.load(turn_ptr) + 1) % TURNS)
    table_out = place.to(tl.int64) * OUT_WIDTH
    pages = ((length + QUERIES - 1) // PAGE + 1).to(tl.int32)
    for start in range(0, pages, BLOCK):
        page = start + tl.arange(0, BLOCK)
        used = page < pages
        known = used & (page < WIDTH)
        tl.store(table_out_ptr + table_out + page, tl.load(table_ptr + row * WIDTH + page, mask=known, other=0), used)
        if WINDOWED:
            ids = tl.load(window_ptr + row * WIDTH + page, mask=known, other=0)
            tl.store(window_out_ptr + table_out + page, ids, used)


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
    n, width, windowed = len(row_index), page_table.shape[1], window_table is not None
    out = out or empty_inputs(n, queries, width, page_size, windowed, row_index.device)
    if n:
        _begin_kernel[(n,)](
            row_index, drafts, next_tokens, length, page_table, window_table if windowed else page_table, turn,
            out.token_ids, out.token_rows, out.positions, out.next_positions, out.slots, out.seq_lens, out.page_table,
            out.window_slots if windowed else out.slots, out.window_table if windowed else out.page_table,
            QUERIES=queries, COLUMNS=power_of_two(queries), ROWS=next_tokens.shape[1], WIDTH=width,
            OUT_WIDTH=out.page_table.shape[1], PAGE=page_size, PADDING=padding, TURNS=turns, WINDOWED=windowed,
            BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


@keep_variants
@triton.jit(
    do_not_specialize_on_alignment=[
        "row_index_ptr", "drafts_ptr", "token_ids_ptr", "finite_ptr", "counts_ptr", "places_ptr",
    ]
)  # fmt: skip
def _end_kernel(
    row_index_ptr,  # [n] int64
    drafts_ptr,  # [n] int64
    token_ids_ptr,  # [n * QUERIES] int64
    finite_ptr,  # [n * QUERIES] bool
    next_tokens_ptr,  # [.., ROWS] int64
    length_ptr,  # [ROWS] int64
    written_ptr,  # [turns, MOST, CELLS] int64
    turn_ptr,  # [1] int64
    counts_ptr,  # [n] int64
    places_ptr,  # [n] int64
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,  # power of two >= QUERIES
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    CELLS: tl.constexpr,
    PADDING: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
    place = tl.program_id(0)
    row = tl.load(row_index_ptr + place)
    drafts = tl.load(drafts_ptr + place).to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    inside = columns < QUERIES
    drawn = tl.load(token_ids_ptr + place * QUERIES + columns, mask=inside, other=0)
    compared = columns < drafts
    drafted = tl.load(next_tokens_ptr + (columns + 1) * ROWS + row, mask=compared, other=0)
    accepted = tl.min(tl.where(compared & (drawn == drafted), COLUMNS, columns), axis=0)
    kept = columns <= accepted
    finite = tl.load(finite_ptr + place * QUERIES + columns, mask=inside & kept, other=1).to(tl.int32)
    all_finite = tl.min(finite, axis=0) != 0
    refused = (drafts - accepted).to(tl.int64)
    if row != PADDING:
        tl.store(next_tokens_ptr + row, tl.sum(tl.where(columns == accepted, drawn, 0), axis=0))
        tl.store(length_ptr + row, tl.load(length_ptr + row) - refused)
        cells_ptr = written_ptr + (tl.load(turn_ptr) * MOST + place) * CELLS
        tl.store(cells_ptr + columns, drawn, mask=inside)
        tl.store(cells_ptr + CELLS - 1, tl.where(all_finite, refused, ~refused))
    tl.store(counts_ptr + place, tl.where(row != PADDING, accepted + 1, 0).to(tl.int64))
    tl.store(places_ptr + place, (place * QUERIES + accepted).to(tl.int64))


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
    counts, places = torch.empty((2, n), dtype=torch.int64, device=row_index.device)
    if n:
        queries, overlap = len(token_ids) // n, launch_for(row_index.device).overlap
        _end_kernel[(n,)](
            row_index, drafts, token_ids, finite, next_tokens, length, written, turn, counts, places,
            QUERIES=queries, COLUMNS=power_of_two(queries), ROWS=next_tokens.shape[1], MOST=written.shape[1],
            CELLS=written.shape[2], PADDING=padding, OVERLAP=overlap, num_warps=1, launch_pdl=overlap,
        )  # fmt: skip
    return Verdict(counts, places)

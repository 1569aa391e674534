"""`NgramKernels` in Triton.

1. search   cuts a row's history into blocks, and each program takes some of them. It counts how many of the row's last
            tokens end at every index, and stores the best index of its blocks as one key.
2. copy     has one program for each row. It takes the highest key, and copies the tokens after that index.

A key is the number of equal tokens and then the index. So the highest key is the longest n-gram's latest occurrence.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.ngram.base import check_sizes
from aengine.kernels.variants import keep_variants

BLOCK = 1024  # tokens that a program reads at once
MOST_PIECES = 128  # programs for one row
RESIDENT = 8  # programs of the search that a processor runs at the same time

_INDEX_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _newest(lengths_ptr, row, CAPACITY: tl.constexpr):
    """Return the index of a row's last token, or -1."""
    return (tl.minimum(tl.load(lengths_ptr + row), CAPACITY) - 1).to(tl.int32)


@keep_variants
@triton.jit(do_not_specialize=["longest", "shortest"], do_not_specialize_on_alignment=["rows_ptr"])
def _search_kernel(
    history_ptr,  # [all rows, CAPACITY] int32
    lengths_ptr,  # [all rows] int64
    rows_ptr,  # [n] int64
    keys_ptr,  # [n, pieces] int64; 0: no n-gram ends in this piece
    longest,
    shortest,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place, piece, pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = tl.load(rows_ptr + place)
    known_ptr = history_ptr + row * CAPACITY
    newest = _newest(lengths_ptr, row, CAPACITY)
    last_token = tl.load(known_ptr + tl.maximum(newest, 0))
    best = tl.zeros([BLOCK], tl.int64)
    for start in range(piece * BLOCK, newest, pieces * BLOCK):
        ends = start + tl.arange(0, BLOCK)
        # Indices from `newest` on are read, too: a mask that depends on it would split the load into single tokens.
        equal = tl.load(known_ptr + ends, mask=ends < CAPACITY, other=-1) == last_token
        equal &= ends < newest
        matched = equal.to(tl.int32)
        before = 1
        while (before < longest) & (tl.max(equal.to(tl.int32), axis=0) > 0):
            equal &= ends >= before
            token = tl.load(known_ptr + tl.maximum(newest - before, 0))
            equal &= tl.load(known_ptr + ends - before, mask=equal, other=-1) == token
            matched += equal.to(tl.int32)
            before += 1
        keys = (matched.to(tl.int64) << 32) + ends
        best = tl.maximum(best, tl.where(matched >= shortest, keys, 0))
    tl.store(keys_ptr + place * pieces + piece, tl.max(best, axis=0))


@keep_variants
@triton.jit(do_not_specialize=["pieces", "drafts"], do_not_specialize_on_alignment=["rows_ptr"])
def _copy_kernel(
    history_ptr,
    lengths_ptr,
    rows_ptr,
    keys_ptr,
    drafts_ptr,  # [n, drafts] int64
    pieces,
    drafts,
    CAPACITY: tl.constexpr,
    PIECE_SLOTS: tl.constexpr,  # powers of two
    DRAFT_SLOTS: tl.constexpr,
):
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    slots = tl.arange(0, PIECE_SLOTS)
    key = tl.max(tl.load(keys_ptr + place * pieces + slots, mask=slots < pieces, other=0), axis=0)
    end = (key & _INDEX_BITS).to(tl.int32)
    followers = tl.maximum(_newest(lengths_ptr, row, CAPACITY) - end, 1)
    columns = tl.arange(0, DRAFT_SLOTS)
    found = tl.where(key > 0, drafts, 0)
    sources = history_ptr + row * CAPACITY + end + 1 + columns % followers
    tokens = tl.load(sources, mask=columns < found, other=-1)
    tl.store(drafts_ptr + place * drafts + columns, tokens.to(tl.int64), mask=columns < drafts)


def match(history: Tensor, lengths: Tensor, rows: Tensor, longest: int, shortest: int, drafts: int) -> Tensor:
    check_sizes(longest, shortest, drafts)
    n, capacity = len(rows), history.shape[1]
    out = torch.empty((n, drafts), dtype=torch.int64, device=history.device)
    if n:
        pieces = _pieces(n, capacity, launch_for(history.device).processors)
        keys = torch.empty((n, pieces), dtype=torch.int64, device=history.device)
        _search_kernel[(n, pieces)](
            history, lengths, rows, keys, longest, shortest, CAPACITY=capacity, BLOCK=BLOCK, num_warps=4
        )
        _copy_kernel[(n,)](
            history, lengths, rows, keys, out, pieces, drafts,
            CAPACITY=capacity, PIECE_SLOTS=MOST_PIECES, DRAFT_SLOTS=power_of_two(drafts), num_warps=1,
        )  # fmt: skip
    return out


def _pieces(rows: int, capacity: int, processors: int) -> int:
    """Return the number of programs that search one row. All programs together fill the device once if they can."""
    blocks: int = triton.cdiv(capacity, BLOCK)
    return min(blocks, max(1, RESIDENT * processors // rows), MOST_PIECES)


@keep_variants
@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows_ptr", "tokens_ptr", "counts_ptr"])
def _append_kernel(
    history_ptr,
    lengths_ptr,
    rows_ptr,
    tokens_ptr,  # [n, width] int64
    counts_ptr,  # [n] int64
    width,
    CAPACITY: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of two
):
    place = tl.program_id(0)
    row = tl.load(rows_ptr + place)
    columns = tl.arange(0, SLOTS)
    used = columns < tl.load(counts_ptr + place)
    tokens = tl.load(tokens_ptr + place * width + columns, mask=used, other=0)
    indices = tl.load(lengths_ptr + row) + columns
    tl.store(history_ptr + row * CAPACITY + indices, tokens.to(tl.int32), mask=used & (indices < CAPACITY))


def append(history: Tensor, lengths: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
    n, width = tokens.shape
    if n:
        _append_kernel[(n,)](
            history, lengths, rows, tokens, counts, width,
            CAPACITY=history.shape[1], SLOTS=power_of_two(width), num_warps=1,
        )  # fmt: skip

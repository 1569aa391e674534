"""What each row's own adapter adds to a product of few rows, within the product's kernel: B inner, where inner = A x.

For one row it is a few multiply-adds more at the end. For several, B's rows of all adapters that occur are further
columns of the weight, and inner further columns of x, which are zero but for a row's own adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

LARGEST = 64  # rank
WIDTH = 32  # columns that adapters of lower rank share: with more, inner takes the registers of another program


@triton.jit
def load_b_row(b_ptr, place, n, N: tl.constexpr, RANK: tl.constexpr):
    """Rows n of one place's B, [len(n), RANK]."""
    rows = b_ptr + place.to(tl.int64) * (N * RANK) + tl.minimum(n, N - 1) * RANK
    return tl.load(rows[:, None] + tl.arange(0, RANK)[None, :])


@triton.jit
def low_rank_row(b, inner_ptr, parts, R: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """What the adapter of the only row adds: b [rows, RANK], parts [rows] -> [rows]."""
    at = inner_ptr + parts[:, None] * RANK + tl.arange(0, RANK)[None, :]
    inner = tl.load(at)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(at + split * R)
    return tl.sum(b.to(tl.float32) * inner, axis=1)


@triton.jit
def load_inner(inner_ptr, rows, own, part, R: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """inner of one part, over and over, zero without an adapter: [len(rows), WIDTH]."""
    at = inner_ptr + rows[:, None] * R + part * RANK + (tl.arange(0, WIDTH) % RANK)[None, :]
    return tl.load(at, mask=(own >= 0)[:, None], other=0.0)


@triton.jit
def add_low_rank(
    acc, inner, b_ptr, n, own, tiles_ptr, count, first, step,
    N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_FIRST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """acc and every `step`-th of the tiles, WIDTH columns at a time; inner [M, WIDTH] in b's dtype."""
    AT_ONCE: tl.constexpr = WIDTH // RANK
    VECTOR: tl.constexpr = 16 if RANK > 16 else RANK
    column = tl.arange(0, WIDTH)
    b_rows = (b_ptr + tl.minimum(n, N - 1) * RANK)[:, None]
    for at in tl.range(first * AT_ONCE, count, step * AT_ONCE, num_stages=STAGES):
        tile = at + column // RANK
        place = tl.load(tiles_ptr + tile, mask=tile < count, other=0)
        offset = place.to(tl.int64) * (N * RANK) + column % RANK
        offset = tl.max_contiguous(tl.multiple_of(offset, VECTOR), VECTOR)
        b = tl.load(b_rows + offset[None, :], mask=(tile < count)[None, :], other=0.0)
        x = tl.where(own[:, None] == tile[None, :], inner, 0.0).to(b.dtype)
        if WEIGHT_FIRST:
            acc = tl.dot(b, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@dataclass(frozen=True, slots=True)
class LowRank:
    """What adapters add to a product of m rows with a weight of n rows: parts of it have factors of their own."""

    inner: Tensor  # [m, parts * rank] float32: A x; of one row [splits, parts * rank], still to be added up
    b: Tensor  # [places, n, rank], the rank a power of two
    parts: Tensor  # [n] int8: the part of each row of the weight
    places: Tensor  # [m] int32: of each row
    own: Tensor  # [m] int32: each row's tile, which are rows with the same adapter; -1 without one
    tiles: Tensor  # [3, capacity] int32: first the place of each tile
    count: Tensor  # [1] int32: the number of tiles

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

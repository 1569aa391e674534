"""What each row's own adapter adds to a product of few rows, within the product's kernel: B inner, where inner = A x.

For one row it is a few multiply-adds more at the end. For several, B's rows of all adapters that occur are further
columns of the weight, and inner is as many of x, zero but for a row's own adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

LARGEST = 64  # rank
WIDTH = 64  # columns that adapters of lower rank share


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
def add_low_rank(
    acc, inner_ptr, b_ptr, rows_m, m, n, part, tiles_ptr, capacity, count, first, step,
    N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc and every `step`-th WIDTH columns of the tiles; part: of the rows n of the weight."""
    VECTOR: tl.constexpr = 16 if RANK > 16 else RANK
    column = tl.arange(0, WIDTH)
    b_rows = (b_ptr + tl.minimum(n, N - 1) * RANK)[:, None]
    x_rows = inner_ptr + (rows_m * (capacity * R))[:, None] + part * (capacity * RANK)
    used = (rows_m < m)[:, None]
    for at in tl.range(first * WIDTH, count * RANK, step * WIDTH, num_stages=STAGES):
        tile = (at + column) // RANK
        known = (tile < count)[None, :]
        place = tl.load(tiles_ptr + tile, mask=tile < count, other=0)
        offset = place.to(tl.int64) * (N * RANK) + column % RANK
        offset = tl.max_contiguous(tl.multiple_of(offset, VECTOR), VECTOR)
        b = tl.load(b_rows + offset[None, :], mask=known, other=0.0)
        x = tl.load(x_rows + (at + column)[None, :], mask=used & known, other=0.0)
        if WEIGHT_FIRST:
            acc = tl.dot(b, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@dataclass(frozen=True, slots=True)
class LowRank:
    """What adapters add to a product of m rows with a weight of n rows: parts of it have factors of their own."""

    inner: Tensor  # [m, parts, capacity, rank]: A x of each tile; of one row [splits, parts * rank], to be added up
    b: Tensor  # [places, n, rank], the rank a power of two
    parts: Tensor  # [n] int8: the part of each row of the weight
    places: Tensor  # [m] int32: of each row
    tiles: Tensor  # [3, capacity] int32: first the place of each tile, which are rows with the same adapter
    count: Tensor  # [1] int32: the number of tiles

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def capacity(self) -> int:
        """Tiles at most."""
        return self.tiles.shape[1]

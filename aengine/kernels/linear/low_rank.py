"""Adds each row's adapter to a product of few rows, within the product's kernel: B inner, where inner = A x.

For one row these are some multiply-adds at the end. For several rows, the rows of B of all adapters in use are more
columns of the weight. inner is as many columns of x, and is zero except for a row's own adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

RANKS = (1, 2, 4, 8, 16, 32, 64)  # of adapters that the kernels add
WIDTH = 64  # columns that adapters of lower rank share


@triton.jit
def load_b_row(b_ptr, place, n, N: tl.constexpr, RANK: tl.constexpr):
    """Load rows n of the B of one place, [len(n), RANK]."""
    rows = b_ptr + place.to(tl.int64) * (N * RANK) + tl.minimum(n, N - 1) * RANK
    return tl.load(rows[:, None] + tl.arange(0, RANK)[None, :])


@triton.jit
def low_rank_row(b, inner_ptr, parts, R: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """Return what the only row's adapter adds: b [rows, RANK], parts [rows] -> [rows]."""
    at = inner_ptr + parts[:, None] * RANK + tl.arange(0, RANK)[None, :]
    inner = tl.load(at)
    for split in tl.static_range(1, SPLITS):
        inner += tl.load(at + split * R)
    return tl.sum(b.to(tl.float32) * inner, axis=1)


@triton.jit
def add_low_rank(
    acc, inner_ptr, b_ptr, rows_m, m, n, part, tiles_ptr, capacity, count, first, step,
    N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add every `step`-th WIDTH columns of the tiles to acc. part: the part of the weight that has rows n."""
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
        acc = tl.dot(b, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters of a product of m rows with a weight of n rows. Each part of the weight has its own factors."""

    inner: Tensor  # [m, parts, capacity, rank]: A x of each tile. For one row: [splits, parts * rank], to be summed.
    b: Tensor  # [places, n, rank], the rank a power of two
    parts: Tensor  # [n] int8: the part of each row of the weight
    places: Tensor  # [m] int32: the place of each row's adapter
    tiles: Tensor  # [3, capacity] int32: first the place of each tile; a tile is rows with one adapter
    count: Tensor  # [1] int32: the number of tiles

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def capacity(self) -> int:
        """Return the most tiles there can be."""
        return self.tiles.shape[1]

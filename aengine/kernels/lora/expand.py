"""y += B inner of each token's own adapter, for any mix of adapters: what follows a product that cannot add it itself.

A program owns a tile of tokens of one adapter and some columns of y. Tokens without an adapter are not touched.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["tokens", "capacity"])
def _expand_kernel(
    y_ptr,  # [tokens, N]
    inner_ptr,  # [SPLITS, tokens, R] float32
    b_ptr,  # [places, N, RANK]
    part_ptr,  # [N] int8: the part of each column
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    tokens,
    capacity,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) % BLOCKS
    tile = tl.program_id(0) // BLOCKS
    if OVERLAP:
        gdc_launch_dependents()
    known = tile < tl.load(count_ptr)
    if known | (tile == 0):  # of every launch some program has to wait
        place = tl.load(tiles_ptr + tile, mask=known, other=0)
        start = tl.load(tiles_ptr + capacity + tile, mask=known, other=0)
        end = tl.load(tiles_ptr + 2 * capacity + tile, mask=known, other=0)
        at = start + tl.arange(0, HEIGHT)
        used = (at < end)[:, None]
        token = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)[:, None]
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        r = tl.arange(0, BLOCK_R)
        part_n = tl.load(part_ptr + tl.minimum(n, N - 1)).to(tl.int32)
        first = tl.min(part_n, axis=0)
        last = tl.max(part_n, axis=0)
        b_rows = (b_ptr + place.to(tl.int64) * (N * RANK) + tl.minimum(n, N - 1) * RANK)[:, None]
        if OVERLAP:
            gdc_wait()
        y_at = y_ptr + token * N + n[None, :]
        inside = used & (n < N)[None, :]
        y = tl.load(y_at, mask=inside, other=0.0)
        acc = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
        for part in range(first, last + 1):  # mostly one
            for begin in tl.range(0, RANK, BLOCK_R, num_stages=1):
                within = (begin + r < RANK)[None, :]
                b = tl.load(b_rows + begin + r[None, :], mask=within & (part_n == part)[:, None], other=0.0)
                inner = tl.zeros([HEIGHT, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    row = inner_ptr + (split * tokens + token) * R + part * RANK + begin + r[None, :]
                    inner += tl.load(row, mask=used & within, other=0.0)
                acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        tl.store(y_at, (y.to(tl.float32) + acc).to(y.dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How one shape is cut up."""

    block_n: int
    warps: int


def expand(inner: Tensor, b: Tensor, parts: Tensor, y: Tensor, order: TokenOrder, config: ExpandConfig) -> Tensor:
    """inner as of `shrink`, b [places, n, rank], parts int8 [n], y [tokens, n], which is added to and returned."""
    (splits, tokens, r), (_, n, rank) = inner.shape, b.shape
    overlap = launch_for(y.device).overlap
    _expand_kernel[(order.capacity * -(-n // config.block_n),)](
        y, inner, b, parts, order.order, order.tiles, order.count, tokens, order.capacity,
        N=n, R=r, RANK=rank, SPLITS=splits, HEIGHT=order.height, BLOCK_N=config.block_n,
        BLOCK_R=min(64, max(16, power_of_two(rank))), PRECISION="ieee" if b.element_size() > 2 else "tf32",
        OVERLAP=overlap, num_warps=config.warps, num_stages=1, launch_pdl=overlap,
    )  # fmt: skip
    return y

"""y += B inner of each token's own adapter, for any mix of adapters: what follows a product that cannot add it itself.

A program owns some columns of y; several share the tiles of tokens of one adapter between them. Tokens without an
adapter are not touched.
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
@triton.jit(do_not_specialize=["capacity", "lanes"])
def _expand_kernel(
    y_ptr,  # [tokens, N]
    inner_ptr,  # [tokens, R] float32
    b_ptr,  # [places, N, RANK]
    part_ptr,  # [N] int8: the part of each column
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    capacity,
    lanes,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.program_id(0) // BLOCKS
    if OVERLAP:
        gdc_launch_dependents()
    r = tl.arange(0, BLOCK_R)
    part_n = tl.load(part_ptr + tl.minimum(n, N - 1)).to(tl.int32)
    first = tl.min(part_n, axis=0)
    last = tl.max(part_n, axis=0)
    if OVERLAP:
        gdc_wait()
    for tile in tl.range(lane, tl.load(count_ptr), lanes, num_stages=1):
        place = tl.load(tiles_ptr + tile)
        end = tl.load(tiles_ptr + 2 * capacity + tile)
        at = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, HEIGHT)
        used = (at < end)[:, None]
        token = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)[:, None]
        b_rows = (b_ptr + place.to(tl.int64) * (N * RANK) + tl.minimum(n, N - 1) * RANK)[:, None]
        y_at = y_ptr + token * N + n[None, :]
        inside = used & (n < N)[None, :]
        y = tl.load(y_at, mask=inside, other=0.0)
        acc = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
        for part in tl.range(first, last + 1, num_stages=1):  # mostly one
            for begin in tl.range(0, RANK, BLOCK_R, num_stages=1):
                within = (begin + r < RANK)[None, :]
                b = tl.load(b_rows + begin + r[None, :], mask=within & (part_n == part)[:, None], other=0.0)
                row = inner_ptr + token * R + part * RANK + begin + r[None, :]
                inner = tl.load(row, mask=used & within, other=0.0)
                acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        tl.store(y_at, (y.to(tl.float32) + acc).to(y.dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How one shape is cut up. programs: about so many for each processor, which share the tiles."""

    block_n: int
    warps: int
    programs: int = 8


def expand(inner: Tensor, b: Tensor, parts: Tensor, y: Tensor, order: TokenOrder, config: ExpandConfig) -> Tensor:
    """inner as of `shrink`, b [places, n, rank], parts int8 [n], y [tokens, n], which is added to and returned."""
    r, (_, n, rank) = inner.shape[1], b.shape
    launch = launch_for(y.device)
    blocks = -(-n // config.block_n)
    lanes = min(order.capacity, -(-config.programs * launch.processors // blocks))
    _expand_kernel[(lanes * blocks,)](
        y, inner, b, parts, order.order, order.tiles, order.count, order.capacity, lanes,
        N=n, R=r, RANK=rank, HEIGHT=order.height, BLOCK_N=config.block_n,
        BLOCK_R=min(64, max(16, power_of_two(rank))), PRECISION="ieee" if b.element_size() > 2 else "tf32",
        OVERLAP=launch.overlap, num_warps=config.warps, num_stages=1, launch_pdl=launch.overlap,
    )  # fmt: skip
    return y

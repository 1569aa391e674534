"""Computes y += B inner for any mix of adapters, after a product that cannot add it.

A program computes a tile of tokens of one adapter and some columns of y. It does not touch tokens without an adapter.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.lora.order import TokenOrder
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _expand_kernel(
    y_ptr,  # [tokens, N]
    inner_ptr,  # [tokens, R] float32
    b_ptr,  # [places, N, RANK]
    part_ptr,  # [N] int8: the part of each column
    order_ptr,  # [tokens]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    capacity,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WHOLE: tl.constexpr,  # the columns of each program all exist and belong to one part
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    n = tl.program_id(0) % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(0) // BLOCKS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tile < tl.load(count_ptr):
        place = tl.load(tiles_ptr + tile).to(tl.int64)
        end = tl.load(tiles_ptr + 2 * capacity + tile)
        at = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, HEIGHT)
        used = (at < end)[:, None]
        token = tl.load(order_ptr + at, mask=at < end, other=0).to(tl.int64)[:, None]
        y_at = y_ptr + token * N + n[None, :]
        inside = used if WHOLE else used & (n < N)[None, :]
        y = tl.load(y_at, mask=inside, other=0.0)
        r = tl.arange(0, BLOCK_R)[None, :]
        b_rows = (b_ptr + place * (N * RANK) + tl.minimum(n, N - 1) * RANK)[:, None]
        rows = inner_ptr + token * R
        acc = tl.zeros([HEIGHT, BLOCK_N], tl.float32)
        if WHOLE:
            part = tl.load(part_ptr + tl.program_id(0) % BLOCKS * BLOCK_N).to(tl.int32)
            for begin in tl.static_range(0, RANK, BLOCK_R):
                b = tl.load(b_rows + begin + r)
                inner = tl.load(rows + part * RANK + begin + r, mask=used, other=0.0)
                acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        else:
            part_n = tl.load(part_ptr + tl.minimum(n, N - 1)).to(tl.int32)
            for part in tl.range(tl.min(part_n, axis=0), tl.max(part_n, axis=0) + 1, num_stages=1):
                for begin in tl.range(0, RANK, BLOCK_R, num_stages=1):
                    within = begin + r < RANK
                    b = tl.load(b_rows + begin + r, mask=within & (part_n == part)[:, None], other=0.0)
                    inner = tl.load(rows + part * RANK + begin + r, mask=used & within, other=0.0)
                    acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision=PRECISION)
        tl.store(y_at, (y.to(tl.float32) + acc).to(y.dtype), mask=inside)


@dataclass(frozen=True, slots=True)
class ExpandConfig:
    """How the kernel divides one shape."""

    block_n: int
    warps: int


def expand(
    inner: Tensor, b: Tensor, parts: Tensor, outputs: Sequence[int], y: Tensor, order: TokenOrder, config: ExpandConfig
) -> Tensor:
    """Add B inner to y [tokens, n] in place, and return y.

    Args:
        inner: From `shrink`.
        b: [places, n, rank].
        parts: int8 [n], the part of each column.
        outputs: The number of columns of each part.
    """
    r, (_, n, rank) = inner.shape[1], b.shape
    overlap = launch_for(y.device).overlap
    block_r = min(64, max(16, power_of_two(rank)))
    whole = all(width % config.block_n == 0 for width in outputs) and rank % block_r == 0
    _expand_kernel[(order.capacity * -(-n // config.block_n),)](
        y, inner, b, parts, order.order, order.tiles, order.count, order.capacity,
        N=n, R=r, RANK=rank, HEIGHT=order.height, BLOCK_N=config.block_n, BLOCK_R=block_r, WHOLE=whole,
        PRECISION="ieee" if b.element_size() > 2 else "tf32", OVERLAP=overlap, num_warps=config.warps, num_stages=1,
        launch_pdl=overlap,
    )  # fmt: skip
    return y

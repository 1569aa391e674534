"""The product of a handful of rows, where in a step each warp has a block of columns of its own for a whole tile.

So a tile may be low, and there are programs enough without pieces of K. What the warps have is added up at the end, in
one order. For the rest see `product`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.int4.block import add_block, load_scales, load_x
from aengine.kernels.linear.int4.results import finish
from aengine.kernels.variants import keep_variants


@triton.jit
def load_blocks(
    words_ptr, tile, block, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):
    """The words [WARPS, BLOCK_N, 32] of a tile and blocks [WARPS]."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16).to(tl.int64)
    half, inner = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 256)[None, None, None, :]
    start = (strip[None, :] * BLOCKS + block[:, None]) * 512  # [WARPS, strips]
    words = tl.load(words_ptr + (start[:, :, None, None] + half * 256 + inner))
    words = tl.reshape(words, [WARPS, BLOCK_N // 16, 2, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(words, [0, 1, 5, 3, 2, 6, 4, 7]), [WARPS, BLOCK_N, 32])


@keep_variants
@triton.jit(do_not_specialize=["m", "splits"])
def int4_few_rows_kernel(
    x_ptr,  # this and what follows as in `product`
    words_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    part_ptr,
    arrived_ptr,
    m,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # at least m
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # steps that are loaded before the wait: 0 to 2
    SCALED: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits
    rows_m = tl.arange(0, M)
    used = (rows_m < m)[None, None, :]
    first = split * BLOCKS // splits
    end = (split + 1) * BLOCKS // splits
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)[None, :]
    warp = tl.arange(0, WARPS)
    x_columns = x_ptr + rows_m.to(tl.int64)[None, None, :] * K
    if OVERLAP:
        gdc_launch_dependents()
    if EARLY > 0:
        early = first + warp
        w_early = load_blocks(words_ptr, tile, tl.minimum(early, BLOCKS - 1), N, BLOCKS, BLOCK_N, WARPS)
        early_scales = load_scales(scales_ptr, tl.minimum(early, BLOCKS - 1)[:, None], inside_n, MXFP4, GROUP, N)
    if EARLY > 1:
        later = first + WARPS + warp
        w_later = load_blocks(words_ptr, tile, tl.minimum(later, BLOCKS - 1), N, BLOCKS, BLOCK_N, WARPS)
        later_scales = load_scales(scales_ptr, tl.minimum(later, BLOCKS - 1)[:, None], inside_n, MXFP4, GROUP, N)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([WARPS, BLOCK_N, M], tl.float32)
    for step in tl.range(first + EARLY * WARPS, end, WARPS, num_stages=STAGES):
        block = tl.minimum(step + warp, BLOCKS - 1)
        words = load_blocks(words_ptr, tile, block, N, BLOCKS, BLOCK_N, WARPS)
        scales = load_scales(scales_ptr, block[:, None], inside_n, MXFP4, GROUP, N)
        mine = used & (step + warp < end)[:, None, None]
        x0 = load_x(x_columns, block[:, None, None], mine, 0, K)
        x1 = load_x(x_columns, block[:, None, None], mine, 1, K)
        x2 = load_x(x_columns, block[:, None, None], mine, 2, K)
        x3 = load_x(x_columns, block[:, None, None], mine, 3, K)
        acc = add_block(acc, words, scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    if EARLY > 0:
        mine = used & (early < end)[:, None, None]
        x0 = load_x(x_columns, early[:, None, None], mine, 0, K)
        x1 = load_x(x_columns, early[:, None, None], mine, 1, K)
        x2 = load_x(x_columns, early[:, None, None], mine, 2, K)
        x3 = load_x(x_columns, early[:, None, None], mine, 3, K)
        acc = add_block(acc, w_early, early_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    if EARLY > 1:
        mine = used & (later < end)[:, None, None]
        x0 = load_x(x_columns, later[:, None, None], mine, 0, K)
        x1 = load_x(x_columns, later[:, None, None], mine, 1, K)
        x2 = load_x(x_columns, later[:, None, None], mine, 2, K)
        x3 = load_x(x_columns, later[:, None, None], mine, 3, K)
        acc = add_block(acc, w_later, later_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    finish(
        tl.trans(tl.sum(acc, axis=0)), bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr,
        m, n, rows_m, tile, split, splits, M, BLOCK_N, N, SPLIT, BIAS, ADD,
    )  # fmt: skip

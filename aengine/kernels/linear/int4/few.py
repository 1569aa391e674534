"""x @ weight.T for 2 to 64 rows and a weight of 4-bit codes: each code is read once and unpacked in registers.

`int4_product_kernel`: a program owns BLOCK_N rows of the weight, M rows of x and one of `splits` pieces of K. For few
rows the scale is applied to the sum of a group, which is exact and rare. For more rows it is applied to the weights, so
that products need not wait for one another.

`int4_few_rows_kernel`: each warp of a program takes every WARPS-th block of columns, over all of K. So tiles may be
low, and there are enough programs without pieces of K. The sums of the warps are added up at the end, in order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.finish import finish, store_result
from aengine.kernels.linear.int4.block import add_block, apply_factors, load_quarters, load_scales, load_words
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["m", "splits"])
def int4_product_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, splits, M, BLOCK_N] float32, if K is split
    arrived_ptr,  # [tiles] int32, zero between launches, if K is split
    m,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 128 columns; the last may be padded
    GROUP: tl.constexpr,
    M: tl.constexpr,  # rows of x of a program
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # whether K is split
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # blocks that are loaded before the wait: 0 to 2
    SCALED: tl.constexpr,  # scales are applied to the weights, not to the sums of a group
    E2M1: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,  # how words are unpacked; empty: without assembly
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    split = tl.program_id(0) % splits
    tiles_m = tl.cdiv(m, M)
    tile = tl.program_id(0) // splits
    tile_n = tile // tiles_m
    rows_m = tile % tiles_m * M + tl.arange(0, M)
    used = (rows_m < m)[None, :]
    first = split * BLOCKS // splits
    end = (split + 1) * BLOCKS // splits
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows after the end read the last row and are not stored.
    inside_n = tl.minimum(n, N - 1)
    x_columns = x_ptr + rows_m.to(tl.int64)[None, :] * K
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: they are loaded while the kernel before this one ends, and are used last.
    early = ()
    for step in tl.static_range(EARLY):
        words = load_words(words_ptr, tile_n, first + step, N, BLOCKS, BLOCK_N)
        early = early + ((words, load_scales(scales_ptr, first + step, inside_n, E2M1, GROUP, N)),)  # noqa: RUF005 (Triton knows no other way)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for block in tl.range(first + EARLY, end, num_stages=STAGES):
        words = load_words(words_ptr, tile_n, block, N, BLOCKS, BLOCK_N)
        scales = load_scales(scales_ptr, block, inside_n, E2M1, GROUP, N)
        x0, x1, x2, x3 = load_quarters(x_columns, block, used, K)
        acc = add_block(acc, words, scales, x0, x1, x2, x3, E2M1, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
        if E2M1 and ASM != "":
            # Products run asynchronously. This move may not be reordered, so the last one ends before the next block is
            # unpacked. ptxas 12.8 unpacked into registers that it still read.
            acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=False, pack=1)
    for step in tl.static_range(EARLY):
        words, scales = early[step]
        x0, x1, x2, x3 = load_quarters(x_columns, first + step, used, K)
        acc = add_block(acc, words, scales, x0, x1, x2, x3, E2M1, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    acc = apply_factors(acc, scales_ptr, inside_n, GROUP, BLOCKS, N)
    inner = tl.arange(0, M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, part_ptr + tile * (splits * M * BLOCK_N) + inner,
        arrived_ptr, (rows_m < m)[:, None], rows_m.to(tl.int64), n, tile, split, splits, N, SPLIT, False, BIAS, ADD,
    )  # fmt: skip


@triton.jit
def load_blocks(
    words_ptr, tile, block, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):
    """Load the words [WARPS, BLOCK_N, 32] of a tile and blocks [WARPS]."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16).to(tl.int64)
    half, inner = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 256)[None, None, None, :]
    start = (strip[None, :] * BLOCKS + block[:, None]) * 512  # [WARPS, strips]
    words = tl.load(words_ptr + (start[:, :, None, None] + half * 256 + inner))
    words = tl.reshape(words, [WARPS, BLOCK_N // 16, 2, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(words, [0, 1, 5, 3, 2, 6, 4, 7]), [WARPS, BLOCK_N, 32])


@keep_variants
@triton.jit(do_not_specialize=["m"])
def int4_few_rows_kernel(
    x_ptr,  # this and the next five: as above
    words_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,  # at least m
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    E2M1: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    rows_m = tl.arange(0, M)
    used = (rows_m < m)[None, None, :]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)[None, :]
    warp = tl.arange(0, WARPS)
    x_columns = x_ptr + rows_m.to(tl.int64)[None, None, :] * K
    if OVERLAP:
        gdc_launch_dependents()
    first = tl.minimum(warp, BLOCKS - 1)
    w_early = load_blocks(words_ptr, tile, first, N, BLOCKS, BLOCK_N, WARPS)
    early_scales = load_scales(scales_ptr, first[:, None], inside_n, E2M1, GROUP, N)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([WARPS, BLOCK_N, M], tl.float32)
    for step in tl.range(WARPS, BLOCKS, WARPS, num_stages=STAGES):
        block = tl.minimum(step + warp, BLOCKS - 1)
        words = load_blocks(words_ptr, tile, block, N, BLOCKS, BLOCK_N, WARPS)
        scales = load_scales(scales_ptr, block[:, None], inside_n, E2M1, GROUP, N)
        mine = used & (step + warp < BLOCKS)[:, None, None]
        x0, x1, x2, x3 = load_quarters(x_columns, block[:, None, None], mine, K)
        acc = add_block(acc, words, scales, x0, x1, x2, x3, E2M1, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    mine = used & (warp < BLOCKS)[:, None, None]
    x0, x1, x2, x3 = load_quarters(x_columns, warp[:, None, None], mine, K)
    acc = add_block(acc, w_early, early_scales, x0, x1, x2, x3, E2M1, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
    result = tl.sum(apply_factors(acc, scales_ptr, inside_n, GROUP, BLOCKS, N), axis=0)
    result = tl.trans(result)
    used = (rows_m < m)[:, None]
    store_result(result, bias_ptr, residual_ptr, out_ptr, used, rows_m.to(tl.int64), n, N, BIAS, ADD)

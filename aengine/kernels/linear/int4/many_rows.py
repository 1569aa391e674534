"""The product of many rows where tensor cores work by themselves (Hopper): a block is unpacked while they multiply.

A block of 128 columns is one product with the weights as the left operand, in registers, and that is what makes it
asynchronous: the next block's weights go into other registers meanwhile. A tile has as many rows of x as fit, so that
few weights are unpacked twice. Tiles that fill whole rounds of the processors are a program's own, those left over are
split. For the rest see `product`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.int4.block import load_scales, load_words, one_after_another, unpack
from aengine.kernels.linear.int4.results import finish
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["m", "whole", "splits"])
def int4_many_rows_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [tiles that are split, splits, M, BLOCK_N] float32
    arrived_ptr,  # [tiles that are split] int32, zero between launches
    m,
    whole,  # tiles
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # whether any tile is
    STAGES: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    program = tl.program_id(0)
    left = tl.maximum(program - whole, 0)
    pieces = tl.where(program < whole, 1, splits)
    split = tl.where(program < whole, 0, left % splits)
    tile = tl.where(program < whole, program, whole + left // splits)
    tiles_m = tl.cdiv(m, M)
    tile_n = tile // tiles_m
    rows_m = tile % tiles_m * M + tl.arange(0, M)
    used = (rows_m < m)[None, :]
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)
    k = tl.arange(0, 128)[:, None]
    x_columns = x_ptr + rows_m.to(tl.int64)[None, :] * K + k
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for block in tl.range(split * BLOCKS // pieces, (split + 1) * BLOCKS // pieces, num_stages=STAGES):
        words = load_words(words_ptr, tile_n, block, N, BLOCKS, BLOCK_N)
        scales = load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
        inside = used & (block * 128 + k < K) if K % 128 else used
        x = tl.load(x_columns + block * 128, mask=inside, other=0.0)
        w0, w1, w2, w3 = unpack(words, scales, x, MXFP4, True, ASM, BASE, LIFT)
        acc = tl.dot(one_after_another(w0, w1, w2, w3, BLOCK_N), x, acc, input_precision=PRECISION)
    finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr,
        m, n, rows_m, tile - whole, split, pieces, M, BLOCK_N, N, SPLIT, BIAS, ADD,
    )  # fmt: skip

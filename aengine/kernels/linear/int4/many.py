"""Many rows and a weight of 4-bit codes: a product of our own, and dense weights for the library's product.

`int4_many_rows_kernel` is for Hopper, whose tensor cores multiply asynchronously. A block of 128 columns is one product
with the weights as the left operand, in registers; the next block is unpacked into other registers meanwhile. A tile
has as many rows of x as fit, so that few weights are unpacked twice. Tiles that fill whole rounds of the processors
belong to one program each; the tiles left over are split along K.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.finish import finish
from aengine.kernels.linear.int4.block import apply_factors, load_scales, load_words, one_after_another, unpack
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
    part_ptr,  # [split tiles, splits, M, BLOCK_N] float32
    arrived_ptr,  # [split tiles] int32, zero between launches
    m,
    whole,  # the number of tiles that are not split
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # whether any tile is split
    STAGES: tl.constexpr,
    E2M1: tl.constexpr,
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
        scales = load_scales(scales_ptr, block, inside_n, E2M1, GROUP, N)
        inside = used & (block * 128 + k < K) if K % 128 else used
        x = tl.load(x_columns + block * 128, mask=inside, other=0.0)
        w0, w1, w2, w3 = unpack(words, scales, x, E2M1, True, GROUP, ASM, BASE, LIFT)
        acc = tl.dot(one_after_another(w0, w1, w2, w3, BLOCK_N), x, acc, input_precision=PRECISION)
    acc = apply_factors(acc, scales_ptr, inside_n, GROUP, BLOCKS, N)
    inner = tl.arange(0, M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, part_ptr + (tile - whole) * (pieces * M * BLOCK_N) + inner,
        arrived_ptr, (rows_m < m)[:, None], rows_m.to(tl.int64), n, tile - whole, split, pieces, N, SPLIT,
        False, BIAS, ADD,
    )  # fmt: skip


@keep_variants
@triton.jit
def dequantise_kernel(
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    out_ptr,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    E2M1: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) % BLOCKS
    n = tl.program_id(0) // BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)
    c = tl.arange(0, 32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    words = load_words(words_ptr, tl.program_id(0) // BLOCKS, block, N, BLOCKS, BLOCK_N)
    scales = load_scales(scales_ptr, block, inside_n, E2M1, GROUP, N)
    if OVERLAP:
        gdc_wait()
    out = out_ptr + n.to(tl.int64)[:, None] * K
    inside = (n < N)[:, None]
    like = tl.zeros([1], out_ptr.dtype.element_ty)
    w0, w1, w2, w3 = unpack(words, scales, like, E2M1, True, GROUP, ASM, BASE, LIFT)
    if GROUP == 16:
        w0 = apply_factors(w0.to(tl.float32), scales_ptr, inside_n, GROUP, BLOCKS, N).to(like.dtype)
        w1 = apply_factors(w1.to(tl.float32), scales_ptr, inside_n, GROUP, BLOCKS, N).to(like.dtype)
        w2 = apply_factors(w2.to(tl.float32), scales_ptr, inside_n, GROUP, BLOCKS, N).to(like.dtype)
        w3 = apply_factors(w3.to(tl.float32), scales_ptr, inside_n, GROUP, BLOCKS, N).to(like.dtype)
    _store_quarter(out, w0, block * 128 + c, inside, K)
    _store_quarter(out, w1, block * 128 + 32 + c, inside, K)
    _store_quarter(out, w2, block * 128 + 64 + c, inside, K)
    _store_quarter(out, w3, block * 128 + 96 + c, inside, K)


@triton.jit
def _store_quarter(out, quarter, k, inside, K: tl.constexpr):
    tl.store(out + k, quarter, mask=inside & (k < K) if K % 128 else inside)

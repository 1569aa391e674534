"""The product of many rows, where the blocks of all tiles, one tile after the other, are dealt out evenly to programs.

So all programs end together, however many tiles there are: at a tile's first and last blocks several meet. For the rest
see `product`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.int4.block import add_block, load_scales, load_words, load_x
from aengine.kernels.linear.int4.results import write
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["m"])
def int4_dealt_out_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [2 * PROGRAMS, BLOCK_N, M] float32
    arrived_ptr,  # [tiles] int32, zero between launches
    m,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
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
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, M)
    units = tl.cdiv(N, BLOCK_N) * tiles_m * BLOCKS
    start = program * units // PROGRAMS
    stop = (program + 1) * units // PROGRAMS
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for tile in range(start // BLOCKS, tl.cdiv(stop, BLOCKS)):
        base = tile * BLOCKS
        tile_n = tile // tiles_m
        rows_m = tile % tiles_m * M + tl.arange(0, M)
        used = (rows_m < m)[None, :]
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = tl.minimum(n, N - 1)
        x_columns = x_ptr + rows_m.to(tl.int64)[None, :] * K
        acc = tl.zeros([BLOCK_N, M], tl.float32)
        for block in tl.range(tl.maximum(start - base, 0), tl.minimum(stop - base, BLOCKS), num_stages=STAGES):
            words = load_words(words_ptr, tile_n, block, N, BLOCKS, BLOCK_N)
            scales = load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
            x0 = load_x(x_columns, block, used, 0, K)
            x1 = load_x(x_columns, block, used, 1, K)
            x2 = load_x(x_columns, block, used, 2, K)
            x3 = load_x(x_columns, block, used, 3, K)
            acc = add_block(acc, words, scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, LIFT, PRECISION)
        # Program p begins with unit p * units // PROGRAMS.
        first = ((base + 1) * PROGRAMS - 1) // units
        last = ((base + BLOCKS) * PROGRAMS - 1) // units
        if first == last:
            write(tl.trans(acc), bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)
        else:
            # Of a program's tiles the first and the last may be shared.
            size: tl.constexpr = M * BLOCK_N
            parts = part_ptr + tl.arange(0, BLOCK_N)[:, None] * M + tl.arange(0, M)[None, :]
            tl.store(parts + _place(start, base, program, size), acc)
            tl.debug_barrier()  # every thread's part is stored before one of them announces it
            if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == last - first:
                tl.debug_barrier()
                tl.store(arrived_ptr + tile, 0)
                whole = tl.zeros([BLOCK_N, M], tl.float32)
                for other in range(first, last + 1):
                    # Other processors wrote these: read past the first-level cache.
                    place = _place(other * units // PROGRAMS, base, other, size)
                    whole += tl.load(parts + place, cache_modifier=".cg")
                write(tl.trans(whole), bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)


@triton.jit
def _place(start, base, program, size: tl.constexpr):
    """Where a program that begins with unit `start` has its part of the tile that begins with unit `base`."""
    return (2 * program + tl.where(start < base, 1, 0)).to(tl.int64) * size

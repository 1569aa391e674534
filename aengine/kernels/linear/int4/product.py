"""x @ weight.T with 4-bit weights, each read once and unpacked in registers on its way to the tensor cores.

A program owns BLOCK_N rows of the weight, M rows of x and one of `splits` pieces of K. For few rows the scale goes
onto the sums of a group, which is exact and rare; for many onto the weights, so that the products need not wait for one
another. What a program loads before it waits for the kernel that makes x, and how split pieces are added up in order,
is as in `small_linear`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.variants import keep_variants


@triton.jit
def _load_scales(scales_ptr, block, n, MXFP4: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr):
    """The words [BLOCK_N] that hold the scales of the quarters of a block; of the same group, the same."""
    if MXFP4:
        first = tl.load(scales_ptr + block * N + n)
        second, third, fourth = first, first, first
    else:
        first = tl.load(scales_ptr + block * 128 // GROUP * N + n)
        second = tl.load(scales_ptr + (block * 128 + 32) // GROUP * N + n) if GROUP < 64 else first
        third = tl.load(scales_ptr + (block * 128 + 64) // GROUP * N + n) if GROUP < 128 else first
        fourth = tl.load(scales_ptr + (block * 128 + 96) // GROUP * N + n) if GROUP < 64 else third
    return first, second, third, fourth


@triton.jit
def _scale(word, QUARTER: tl.constexpr, MXFP4: tl.constexpr):
    """[..., BLOCK_N] -> [..., BLOCK_N, 1] float32."""
    bits = ((word >> (8 * QUARTER)) & 255) << 23 if MXFP4 else word & ~255
    return tl.expand_dims(bits.to(tl.float32, bitcast=True), -1)


@triton.jit
def _offset(word, BASE: tl.constexpr, dtype: tl.constexpr):
    """What is added to a code that stands in the mantissa of BASE, [..., BLOCK_N, 1]."""
    return tl.expand_dims((-BASE - (word & 255)).to(tl.float32).to(dtype), -1)


@triton.jit
def _plain(words, scale, QUARTER: tl.constexpr, MXFP4: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr):
    """One quarter without a word of assembly: any dtype, any device."""
    code = (words.to(tl.int32) >> (4 * QUARTER)) & 15
    if MXFP4:
        magnitude = ((code & 7) << 22).to(tl.float32, bitcast=True) * 2.0**126
        number = tl.where(code > 7, -magnitude, magnitude)
    else:
        number = (code - tl.expand_dims(scale & 255, -1)).to(tl.float32)
    if SCALED:
        number *= _scale(scale, QUARTER, MXFP4)
    return number.to(dtype)


@triton.jit
def _unpack(words, scales, like, MXFP4: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr):
    """words [..., BLOCK_N, 32], scales of the quarters [..., BLOCK_N] -> four quarters of a block [..., BLOCK_N, 32].

    like: of the dtype that the weights are to have.
    """
    dtype: tl.constexpr = like.dtype
    if ASM == "":
        return (
            _plain(words, scales[0], 0, MXFP4, SCALED, dtype),
            _plain(words, scales[1], 1, MXFP4, SCALED, dtype),
            _plain(words, scales[2], 2, MXFP4, SCALED, dtype),
            _plain(words, scales[3], 3, MXFP4, SCALED, dtype),
        )
    if MXFP4:
        tl.static_assert(SCALED)
        o0, o1, o2, o3 = _offsets_of_none(dtype)
    else:
        o0, o1 = _offset(scales[0], BASE, dtype), _offset(scales[1], BASE, dtype)
        o2, o3 = _offset(scales[2], BASE, dtype), _offset(scales[3], BASE, dtype)
    if SCALED:
        s0, s1 = _scale(scales[0], 0, MXFP4).to(dtype), _scale(scales[1], 1, MXFP4).to(dtype)
        s2, s3 = _scale(scales[2], 2, MXFP4).to(dtype), _scale(scales[3], 3, MXFP4).to(dtype)
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, o0, o1, o2, o3, s0, s1, s2, s3],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, o0, o1, o2, o3],
        dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _offsets_of_none(dtype: tl.constexpr):
    zero = tl.zeros([1], dtype)
    return zero, zero, zero, zero


@triton.jit
def _load_words(words_ptr, tile, block, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The words [BLOCK_N, 32] of a tile and a block, in the order of memory until they are in registers."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16).to(tl.int64)
    half, inner = tl.arange(0, 2)[:, None, None], tl.arange(0, 256)[None, None, :]
    words = tl.load(words_ptr + ((strip[None, :, None] * BLOCKS + block) * 512 + half * 256 + inner))
    words = tl.reshape(words, [2, BLOCK_N // 16, 8, 4, 2, 2, 2])  # half, tile, r, t, eight of rows, of words, pair
    return tl.reshape(tl.permute(words, [1, 4, 2, 0, 5, 3, 6]), [BLOCK_N, 32])


@triton.jit
def _load_blocks(
    words_ptr, tile, block, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr
):
    """The words [WARPS, BLOCK_N, 32] of a tile and blocks [WARPS]."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16).to(tl.int64)
    half, inner = tl.arange(0, 2)[:, None, None, None], tl.arange(0, 256)[None, None, None, :]
    start = (strip[:, None] * BLOCKS + block[None, :]) * 512  # [strips, WARPS]
    words = tl.load(words_ptr + (start[None, :, :, None] + half * 256 + inner))
    words = tl.reshape(words, [2, BLOCK_N // 16, WARPS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(words, [2, 1, 5, 3, 0, 6, 4, 7]), [WARPS, BLOCK_N, 32])


@triton.jit
def _prefetch(
    words_ptr, tile, first, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr
):
    """Calls for the words of COUNT blocks of a tile, so that they are in the second-level cache when they are loaded.

    One thread for each 16 rows.
    """
    strips: tl.constexpr = BLOCK_N // 16
    strip = tl.minimum(tile * strips + tl.arange(0, strips), (N - 1) // 16).to(tl.int64)
    size = tl.minimum(COUNT, BLOCKS - first) * 1024 + tl.zeros([strips], tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 t;
        mov.u32 t, %tid.x;
        setp.lt.u32 p, t, $3;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""", "=r,l,r,r", [words_ptr + (strip * BLOCKS + first) * 512, size, tl.full([strips], strips, tl.int32)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_x(x_columns, block, used, QUARTER: tl.constexpr, K: tl.constexpr):
    """A quarter of a block of x, [..., 32, M]; x_columns: of the first block."""
    c = tl.arange(0, 32)[:, None]
    k = block * 128 + QUARTER * 32 + c
    inside = used & (k < K) if K % 128 else used
    return tl.load(x_columns + k, mask=inside, other=0.0)


@triton.jit
def _add_block(
    acc, words, scales, x0, x1, x2, x3,
    MXFP4: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, M] plus the product of a block of weights [BLOCK_N, 128] with quarters of x [32, M].

    All of them may have a leading axis.
    """
    w0, w1, w2, w3 = _unpack(words, scales, x0, MXFP4, SCALED, ASM, BASE)
    if SCALED:
        acc = tl.dot(w0, x0, acc, input_precision=PRECISION)
        acc = tl.dot(w1, x1, acc, input_precision=PRECISION)
        acc = tl.dot(w2, x2, acc, input_precision=PRECISION)
        acc = tl.dot(w3, x3, acc, input_precision=PRECISION)
    else:
        part = tl.dot(w0, x0, input_precision=PRECISION)
        if GROUP < 64:
            acc += part * _scale(scales[0], 0, MXFP4)
            part = tl.dot(w1, x1, input_precision=PRECISION)
        else:
            part = tl.dot(w1, x1, part, input_precision=PRECISION)
        if GROUP < 128:
            acc += part * _scale(scales[1], 1, MXFP4)
            part = tl.dot(w2, x2, input_precision=PRECISION)
        else:
            part = tl.dot(w2, x2, part, input_precision=PRECISION)
        if GROUP < 64:
            acc += part * _scale(scales[2], 2, MXFP4)
            part = tl.dot(w3, x3, input_precision=PRECISION)
        else:
            part = tl.dot(w3, x3, part, input_precision=PRECISION)
        acc += part * _scale(scales[3], 3, MXFP4)
    return acc


@keep_variants
@triton.jit(do_not_specialize=["m"])
def int4_many_rows_kernel(
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
    PREFETCH: tl.constexpr,  # blocks that are called for before the wait
    SCALED: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `int4_product_kernel`, but the blocks of all tiles, one tile after the other, are dealt out evenly.

    So all programs end together, however many tiles there are: at a tile's first and last blocks several meet.
    """
    program = tl.program_id(0)
    tiles_m = tl.cdiv(m, M)
    units = tl.cdiv(N, BLOCK_N) * tiles_m * BLOCKS
    start = program * units // PROGRAMS
    stop = (program + 1) * units // PROGRAMS
    if OVERLAP:
        gdc_launch_dependents()
        if PREFETCH:
            _prefetch(words_ptr, start // BLOCKS // tiles_m, start % BLOCKS, N, BLOCKS, BLOCK_N, PREFETCH)
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
            words = _load_words(words_ptr, tile_n, block, N, BLOCKS, BLOCK_N)
            scales = _load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
            x0 = _load_x(x_columns, block, used, 0, K)
            x1 = _load_x(x_columns, block, used, 1, K)
            x2 = _load_x(x_columns, block, used, 2, K)
            x3 = _load_x(x_columns, block, used, 3, K)
            acc = _add_block(acc, words, scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
        # Program p begins with unit p * units // PROGRAMS.
        first = ((base + 1) * PROGRAMS - 1) // units
        last = ((base + BLOCKS) * PROGRAMS - 1) // units
        if first == last:
            _write(tl.trans(acc), bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)
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
                _write(tl.trans(whole), bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)


@triton.jit
def _place(start, base, program, size: tl.constexpr):
    """Where a program that begins with unit `start` has its part of the tile that begins with unit `base`."""
    return (2 * program + tl.where(start < base, 1, 0)).to(tl.int64) * size


@keep_variants
@triton.jit(do_not_specialize=["m", "splits"])
def int4_product_kernel(
    x_ptr,  # [m, K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [m, N], ADD only; may be out_ptr
    out_ptr,  # [m, N]
    part_ptr,  # [tiles, splits, M, BLOCK_N] float32, where K is split
    arrived_ptr,  # [tiles] int32, zero between launches, where K is split
    m,
    splits,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 128 columns; the last may be filled up
    GROUP: tl.constexpr,
    M: tl.constexpr,  # rows of x of a program
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # whether K is
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,  # blocks that are loaded before the wait: 0 to 2
    PREFETCH: tl.constexpr,  # blocks that are called for before it
    SCALED: tl.constexpr,  # the weights, rather than the sums of a group
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,  # how words are unpacked; empty: without assembly
    BASE: tl.constexpr,
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
    # Rows past the end read the last row, and are not stored.
    inside_n = tl.minimum(n, N - 1)
    x_columns = x_ptr + rows_m.to(tl.int64)[None, :] * K
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: these are on their way while the kernel before this one ends, and are used last.
    if EARLY > 0:
        w_early = _load_words(words_ptr, tile_n, first, N, BLOCKS, BLOCK_N)
        early_scales = _load_scales(scales_ptr, first, inside_n, MXFP4, GROUP, N)
    if EARLY > 1:
        w_later = _load_words(words_ptr, tile_n, first + 1, N, BLOCKS, BLOCK_N)
        later_scales = _load_scales(scales_ptr, first + 1, inside_n, MXFP4, GROUP, N)
    if OVERLAP:
        if PREFETCH:
            _prefetch(words_ptr, tile_n, first, N, BLOCKS, BLOCK_N, PREFETCH)
        gdc_wait()
    acc = tl.zeros([BLOCK_N, M], tl.float32)
    for block in tl.range(first + EARLY, end, num_stages=STAGES):
        words = _load_words(words_ptr, tile_n, block, N, BLOCKS, BLOCK_N)
        scales = _load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
        x0 = _load_x(x_columns, block, used, 0, K)
        x1 = _load_x(x_columns, block, used, 1, K)
        x2 = _load_x(x_columns, block, used, 2, K)
        x3 = _load_x(x_columns, block, used, 3, K)
        acc = _add_block(acc, words, scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    if EARLY > 0:
        x0 = _load_x(x_columns, first, used, 0, K)
        x1 = _load_x(x_columns, first, used, 1, K)
        x2 = _load_x(x_columns, first, used, 2, K)
        x3 = _load_x(x_columns, first, used, 3, K)
        acc = _add_block(acc, w_early, early_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    if EARLY > 1:
        x0 = _load_x(x_columns, first + 1, used, 0, K)
        x1 = _load_x(x_columns, first + 1, used, 1, K)
        x2 = _load_x(x_columns, first + 1, used, 2, K)
        x3 = _load_x(x_columns, first + 1, used, 3, K)
        acc = _add_block(acc, w_later, later_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    _finish(
        tl.trans(acc), bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr,
        m, n, rows_m, tile, split, splits, M, BLOCK_N, N, SPLIT, BIAS, ADD,
    )  # fmt: skip


@keep_variants
@triton.jit(do_not_specialize=["m", "splits"])
def int4_few_rows_kernel(
    x_ptr,
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
    PREFETCH: tl.constexpr,  # blocks that are called for before it
    SCALED: tl.constexpr,
    MXFP4: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `int4_product_kernel`, but in a step each warp has a block of columns of its own, and all rows of the tile.

    A tile may be low, so that there are programs enough without pieces of K. What the warps have is added up at the
    end, in one order.
    """
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
        w_early = _load_blocks(words_ptr, tile, tl.minimum(early, BLOCKS - 1), N, BLOCKS, BLOCK_N, WARPS)
        early_scales = _load_scales(scales_ptr, tl.minimum(early, BLOCKS - 1)[:, None], inside_n, MXFP4, GROUP, N)
    if EARLY > 1:
        later = first + WARPS + warp
        w_later = _load_blocks(words_ptr, tile, tl.minimum(later, BLOCKS - 1), N, BLOCKS, BLOCK_N, WARPS)
        later_scales = _load_scales(scales_ptr, tl.minimum(later, BLOCKS - 1)[:, None], inside_n, MXFP4, GROUP, N)
    if OVERLAP:
        if PREFETCH:
            _prefetch(words_ptr, tile, first, N, BLOCKS, BLOCK_N, PREFETCH)
        gdc_wait()
    acc = tl.zeros([WARPS, BLOCK_N, M], tl.float32)
    for step in tl.range(first + EARLY * WARPS, end, WARPS, num_stages=STAGES):
        block = tl.minimum(step + warp, BLOCKS - 1)
        words = _load_blocks(words_ptr, tile, block, N, BLOCKS, BLOCK_N, WARPS)
        scales = _load_scales(scales_ptr, block[:, None], inside_n, MXFP4, GROUP, N)
        mine = used & (step + warp < end)[:, None, None]
        x0 = _load_x(x_columns, block[:, None, None], mine, 0, K)
        x1 = _load_x(x_columns, block[:, None, None], mine, 1, K)
        x2 = _load_x(x_columns, block[:, None, None], mine, 2, K)
        x3 = _load_x(x_columns, block[:, None, None], mine, 3, K)
        acc = _add_block(acc, words, scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    if EARLY > 0:
        mine = used & (early < end)[:, None, None]
        x0 = _load_x(x_columns, early[:, None, None], mine, 0, K)
        x1 = _load_x(x_columns, early[:, None, None], mine, 1, K)
        x2 = _load_x(x_columns, early[:, None, None], mine, 2, K)
        x3 = _load_x(x_columns, early[:, None, None], mine, 3, K)
        acc = _add_block(acc, w_early, early_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    if EARLY > 1:
        mine = used & (later < end)[:, None, None]
        x0 = _load_x(x_columns, later[:, None, None], mine, 0, K)
        x1 = _load_x(x_columns, later[:, None, None], mine, 1, K)
        x2 = _load_x(x_columns, later[:, None, None], mine, 2, K)
        x3 = _load_x(x_columns, later[:, None, None], mine, 3, K)
        acc = _add_block(acc, w_later, later_scales, x0, x1, x2, x3, MXFP4, SCALED, GROUP, ASM, BASE, PRECISION)
    _finish(
        tl.trans(tl.sum(acc, axis=0)), bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr,
        m, n, rows_m, tile, split, splits, M, BLOCK_N, N, SPLIT, BIAS, ADD,
    )  # fmt: skip


@triton.jit
def _finish(
    result, bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, m, n, rows_m, tile, split, splits,
    M: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores a result [M, BLOCK_N], or adds it to those of the other pieces, in order, where it comes last."""
    if not SPLIT:
        _write(result, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)
    else:
        size: tl.constexpr = M * BLOCK_N
        used = (rows_m < m)[:, None]
        inner = tl.arange(0, M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = part_ptr + tile * (splits * size) + inner
        tl.store(parts + split * size, result, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([M, BLOCK_N], tl.float32)
            for other in range(splits):
                # Other processors wrote these: read past the first-level cache.
                whole += tl.load(parts + other * size, mask=used, other=0.0, cache_modifier=".cg")
            _write(whole, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)


@triton.jit
def _write(
    result, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    inside = (rows_m < m)[:, None] & (n < N)[None, :]
    offsets = rows_m.to(tl.int64)[:, None] * N + n[None, :]
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        result += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


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
    MXFP4: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) % BLOCKS
    n = tl.program_id(0) // BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = tl.minimum(n, N - 1)
    c = tl.arange(0, 32)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
    words = _load_words(words_ptr, tl.program_id(0) // BLOCKS, block, N, BLOCKS, BLOCK_N)
    scales = _load_scales(scales_ptr, block, inside_n, MXFP4, GROUP, N)
    if OVERLAP:
        gdc_wait()
    out = out_ptr + n.to(tl.int64)[:, None] * K
    inside = (n < N)[:, None]
    w0, w1, w2, w3 = _unpack(words, scales, tl.zeros([1], out_ptr.dtype.element_ty), MXFP4, True, ASM, BASE)
    _store_quarter(out, w0, block * 128 + c, inside, K)
    _store_quarter(out, w1, block * 128 + 32 + c, inside, K)
    _store_quarter(out, w2, block * 128 + 64 + c, inside, K)
    _store_quarter(out, w3, block * 128 + 96 + c, inside, K)


@triton.jit
def _store_quarter(out, quarter, k, inside, K: tl.constexpr):
    tl.store(out + k, quarter, mask=inside & (k < K) if K % 128 else inside)

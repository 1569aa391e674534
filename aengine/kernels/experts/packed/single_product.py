"""Blocks of 4-bit codes times those of a row, for `single_rows`. The product is that of `int4.row`.

Each warp of a program has its own block of columns. Rows are 16, or a multiple of that.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.linear.int4.block import e2m1
from aengine.kernels.linear.int4.row import load_row, operand, parted, quarters, unpack_row


@triton.jit
def load_blocks(
    words_ptr, scales_ptr, strip, first, BLOCKS: tl.constexpr, ALL_ROWS: tl.constexpr, GROUP: tl.constexpr,
    E2M1: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Load a block for each warp from `first` on, of strips [T]: words [WARPS, T, 2, 256], scales [32, WARPS, T, 2].

    The order of the axes gives each lane of each warp the numbers that it multiplies. NVFP4 has a word of scales for
    each half of the quarters, [32, WARPS, T, 2, 2].
    """
    strip = strip.to(tl.int64)
    block = first + tl.arange(0, WARPS)
    half, inner = tl.arange(0, 2)[None, None, :, None], tl.arange(0, 256)[None, None, None, :]
    start = (strip[None, :] * BLOCKS + block[:, None]) * 512
    words = tl.load(words_ptr + (start[:, :, None, None] + half * 256 + inner),
                    mask=(block < BLOCKS)[:, None, None, None], other=0)  # fmt: skip
    lane, eight = tl.arange(0, 32)[:, None, None, None], tl.arange(0, 2)[None, None, None, :]
    n = strip[None, None, :, None] * 16 + eight * 8 + lane // 4
    if GROUP == 16:
        group = 2 * block[None, :, None, None, None] + tl.arange(0, 2)[None, None, None, None, :]
        scales = tl.load(scales_ptr + (group * ALL_ROWS + n[:, :, :, :, None]),
                         mask=(block < BLOCKS)[None, :, None, None, None], other=0)  # fmt: skip
    else:
        group = block if E2M1 else block * 128 // GROUP
        scales = tl.load(scales_ptr + (group[None, :, None, None] * ALL_ROWS + n),
                         mask=(block < BLOCKS)[None, :, None, None], other=0)  # fmt: skip
    return words, scales


@triton.jit
def load_row_blocks(row_ptr, first: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr, PAIRS: tl.constexpr):
    """Load the row's block for each warp. PAIRS: each lane's own pairs of numbers, [32, WARPS, 16] int32."""
    if PAIRS:
        # Hide from the compiler that neighbours are contiguous, so that each lane loads one word of each piece.
        t = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tl.arange(0, 32) % 4], dtype=tl.int32, is_pure=True, pack=1
        )
        place = ((first + tl.arange(0, WARPS))[None, :] * 64 + t[:, None])[:, :, None]
        piece = tl.arange(0, 16)[None, None, :] * 4
        pointers = row_ptr.to(tl.pointer_type(tl.int32)) + place + piece
        row = (
            tl.load(pointers) if (first + WARPS) * 128 <= K else tl.load(pointers, mask=place + piece < K // 2, other=0)
        )
    else:
        row = load_row(row_ptr, first, K, WARPS, 1, False)
    return row


@triton.jit
def operands(row, like, WARPS: tl.constexpr, PAIRS: tl.constexpr):
    """Make a row's blocks, of `load_row_blocks`, the right operands of the four quarters, each [WARPS, 32, 8]."""
    if PAIRS:
        low, high = parted(row, like)
        # eight times the same, t, warp, two and two quarters, half, eight of words, pair
        row = tl.reshape(tl.join(low, high), [8, 4, WARPS, 2, 2, 2, 2, 2])
        # warp, half, t, eight of words, pair, eight times the same, two and two quarters
        even, odd = tl.split(tl.permute(row, [2, 5, 1, 6, 7, 0, 3, 4]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        x0, x1 = tl.reshape(x0, [WARPS, 32, 8]), tl.reshape(x1, [WARPS, 32, 8])
        x2, x3 = tl.reshape(x2, [WARPS, 32, 8]), tl.reshape(x3, [WARPS, 32, 8])
    else:
        x0, x1, x2, x3 = quarters(row, WARPS, 1, False)
        x0, x1 = operand(x0, like, WARPS, 1, False), operand(x1, like, WARPS, 1, False)
        x2, x3 = operand(x2, like, WARPS, 1, False), operand(x3, like, WARPS, 1, False)
    return x0, x1, x2, x3


@triton.jit
def _by_row(scales, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Reorder scales [32, WARPS, T, 2] -> [WARPS, ROWS, 4], with four equal columns."""
    lanes = tl.permute(tl.reshape(scales, [8, 4, WARPS, ROWS // 16, 2]), [2, 3, 4, 0, 1])
    return tl.reshape(lanes, [WARPS, ROWS, 4])


@triton.jit
def _zeros_of(scales, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Expand zeros [32, WARPS, T, 2] to the columns of a quarter, [WARPS, ROWS, 32]."""
    wide = tl.reshape(_by_row(scales, ROWS, WARPS), [WARPS, ROWS, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(wide, [WARPS, ROWS, 2, 4, 4]), [WARPS, ROWS, 32])


@triton.jit
def _unpacked(
    words, scales, like, ROWS: tl.constexpr, WARPS: tl.constexpr, E2M1: tl.constexpr, ASM: tl.constexpr,
    BASE: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Unpack four quarters of blocks [WARPS, ROWS, 32] without their scales."""
    if not E2M1:
        return unpack_row(words, _zeros_of(scales & 255, ROWS, WARPS), like, ASM, BASE, LIFT)
    if ASM == "":
        w0, w1 = e2m1(words, 0).to(like.dtype), e2m1(words, 1).to(like.dtype)
        w2, w3 = e2m1(words, 2).to(like.dtype), e2m1(words, 3).to(like.dtype)
        return w0, w1, w2, w3
    added = tl.zeros([1, 1, 1], like.dtype)  # 4-bit floats have no zeros to subtract
    return tl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, added, added, added, added],
        dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def product(
    words, scales, x0, x1, x2, x3, ROWS: tl.constexpr, WARPS: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr,
    ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply blocks of words, as `load_blocks` has them, by those of a row: [WARPS, ROWS, 4], with equal columns.

    The sums of NVFP4 lack the rows' factors.
    """
    words = tl.reshape(words, [WARPS, ROWS // 16, 2, 8, 4, 2, 2, 2])
    if GROUP == 16:
        # warp, tile, eight of rows, r, t, eight of words, pair, half
        words = tl.reshape(tl.permute(words, [0, 1, 5, 3, 4, 6, 7, 2]), [WARPS, ROWS, 16, 2])
        first, second = tl.split(words)
        first_scales, second_scales = tl.split(scales)
        a0, b0 = _halves(x0, WARPS)
        a1, b1 = _halves(x1, WARPS)
        a2, b2 = _halves(x2, WARPS)
        a3, b3 = _halves(x3, WARPS)
        part = _half_product(first, first_scales, a0, a1, a2, a3, ROWS, WARPS, ASM, BASE, LIFT, PRECISION)
        part += _half_product(second, second_scales, b0, b1, b2, b3, ROWS, WARPS, ASM, BASE, LIFT, PRECISION)
    else:
        # warp, tile, eight of rows, r, half, t, eight of words, pair
        words = tl.reshape(tl.permute(words, [0, 1, 5, 3, 2, 4, 6, 7]), [WARPS, ROWS, 32])
        w0, w1, w2, w3 = _unpacked(words, scales, x0, ROWS, WARPS, E2M1, ASM, BASE, LIFT)
        if E2M1:
            bits = _by_row(scales, ROWS, WARPS)
            if LIFT > 1:  # no byte carries into the next if 2 ** 126 times a scale fits float32
                bits += 0x7E7E7E7E
            part = _one_of_two(tl.dot(w0, x0, input_precision=PRECISION), ROWS, WARPS) * _power(bits << 23)
            part += _one_of_two(tl.dot(w1, x1, input_precision=PRECISION), ROWS, WARPS) * _power(bits << 15)
            part += _one_of_two(tl.dot(w2, x2, input_precision=PRECISION), ROWS, WARPS) * _power(bits << 7)
            part += _one_of_two(tl.dot(w3, x3, input_precision=PRECISION), ROWS, WARPS) * _power(bits >> 1)
        else:
            part = tl.dot(w0, x0, input_precision=PRECISION)
            part = tl.dot(w1, x1, part, input_precision=PRECISION)
            part = tl.dot(w2, x2, part, input_precision=PRECISION)
            part = _one_of_two(tl.dot(w3, x3, part, input_precision=PRECISION), ROWS, WARPS)
            part *= _by_row((scales & ~255).to(tl.float32, bitcast=True) * LIFT, ROWS, WARPS)
    return part


@triton.jit
def _one_of_two(product, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """[WARPS, ROWS, 8] -> [WARPS, ROWS, 4]. All columns are equal, and a lane has two of them."""
    first, _ = tl.split(tl.reshape(product, [WARPS, ROWS, 4, 2]))
    return first


@triton.jit
def _power(bits):
    """Return 2 ** (bits 23 to 30 - 127), with 0 for 2 ** -127."""
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _halves(x, WARPS: tl.constexpr):
    """Split the right operand of a quarter, [WARPS, 32, 8], into those of its halves."""
    return tl.split(tl.permute(tl.reshape(x, [WARPS, 2, 16, 8]), [0, 2, 3, 1]))


@triton.jit
def _half_product(
    words, scales, x0, x1, x2, x3, ROWS: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr,
    LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply halves of quarters of NVFP4. words: [WARPS, ROWS, 16]; scales: a byte for each quarter."""
    w0, w1, w2, w3 = _unpacked(words, scales, x0, ROWS, WARPS, True, ASM, BASE, LIFT)
    bits = _by_row(scales, ROWS, WARPS)
    part = _one_of_two(tl.dot(w0, x0, input_precision=PRECISION), ROWS, WARPS) * _nvfp4_scale(bits, 0, LIFT)
    part += _one_of_two(tl.dot(w1, x1, input_precision=PRECISION), ROWS, WARPS) * _nvfp4_scale(bits, 1, LIFT)
    part += _one_of_two(tl.dot(w2, x2, input_precision=PRECISION), ROWS, WARPS) * _nvfp4_scale(bits, 2, LIFT)
    part += _one_of_two(tl.dot(w3, x3, input_precision=PRECISION), ROWS, WARPS) * _nvfp4_scale(bits, 3, LIFT)
    return part


@triton.jit
def _nvfp4_scale(bits, QUARTER: tl.constexpr, LIFT: tl.constexpr):
    """Return 2 ** -10 times a quarter's scales, and times 2 ** 126 if numbers lack it. Codes with scale 0 are 0."""
    MORE: tl.constexpr = (117 - 10 + (126 if LIFT > 1 else 0)) << 23
    return (((bits >> (8 * QUARTER) & 255) << 20) + MORE).to(tl.float32, bitcast=True)


@triton.jit
def row_factors(scales_ptr, strip, BLOCKS: tl.constexpr, ALL_ROWS: tl.constexpr):
    """Return the factors of the rows of strips [T] of NVFP4, [16 * T] float32."""
    n = tl.ravel(strip[:, None] * 16 + tl.arange(0, 16)[None, :])
    return tl.load(scales_ptr + 2 * BLOCKS * ALL_ROWS + n).to(tl.float32, bitcast=True)

"""One row times a weight of 4-bit codes.

`int4_one_row_kernel`: a program owns BLOCK_N rows of the weight, each of its warps every WARPS-th block of them. All of
its weights are in flight before it waits for the row. Only x and the sums of the warps move between threads. That pays
if all weights fit into registers at once.

`int4.streamed_row` is for more programs than fit, or for longer rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.finish import store_result
from aengine.kernels.linear.int4.block import offset
from aengine.kernels.variants import keep_variants


@triton.jit
def _load_weights(
    words_ptr, scales_ptr, tile, N: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Load WARPS * STEPS blocks of a tile: words [WARPS, STEPS, strips, 2, 256], scales [32, WARPS, STEPS, strips, 2].

    The order of the axes gives each lane of each warp the numbers that it multiplies.
    """
    STRIPS: tl.constexpr = BLOCK_N // 16
    warp, step, strip = tl.arange(0, WARPS), tl.arange(0, STEPS), tile * STRIPS + tl.arange(0, STRIPS)
    block = warp[:, None, None, None, None] + WARPS * step[None, :, None, None, None]
    half, inner = tl.arange(0, 2)[None, None, None, :, None], tl.arange(0, 256)[None, None, None, None, :]
    start = (tl.minimum(strip, (N - 1) // 16).to(tl.int64)[None, None, :, None, None] * BLOCKS + block) * 512
    words = tl.load(words_ptr + (start + half * 256 + inner), mask=block < BLOCKS, other=0)
    block = warp[None, :, None, None, None] + WARPS * step[None, None, :, None, None]
    lane, eight = tl.arange(0, 32)[:, None, None, None, None], tl.arange(0, 2)[None, None, None, None, :]
    n = tl.minimum(strip[None, None, None, :, None] * 16 + eight * 8 + lane // 4, N - 1)
    scales = tl.load(scales_ptr + (block * 128 // GROUP * N + n), mask=block < BLOCKS, other=0)
    return words, scales


@triton.jit
def load_row(row_ptr, first, K: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Load blocks of a row, [WARPS, STEPS, 128], or as pairs of numbers in words, [WARPS, STEPS, 64] int32."""
    block = first + tl.arange(0, WARPS)[:, None, None] + WARPS * tl.arange(0, STEPS)[None, :, None]
    if PAIRS:
        place = block * 64 + tl.arange(0, 64)[None, None, :]
        row = tl.load(row_ptr.to(tl.pointer_type(tl.int32)) + place, mask=place < K // 2, other=0)
    else:
        place = block * 128 + tl.arange(0, 128)[None, None, :]
        row = tl.load(row_ptr + place, mask=place < K, other=0.0)
    return row


@triton.jit
def parted(words, like):
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(like.dtype, like.dtype), is_pure=True, pack=1
    )


@triton.jit
def quarters(row, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Split a row's blocks into four tensors [WARPS, STEPS, 32], or of 16 words."""
    row = tl.reshape(row, [WARPS, STEPS, 2, 2, 16 if PAIRS else 32])
    even, odd = tl.split(tl.permute(row, [0, 1, 4, 3, 2]))
    first, second = tl.split(even)
    third, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def operand(quarter, like, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Make a quarter the right operand [STEPS * WARPS, 32, 8]: the same column eight times.

    Its rows are ordered so that those of one thread are neighbours, as the columns of the weights are.
    """
    if PAIRS:
        low, high = parted(quarter, like)
        quarter = tl.join(low, high)
    quarter = tl.reshape(quarter, [WARPS, STEPS, 2, 2, 4, 2])  # warp, step, half, eight, t, pair
    quarter = tl.reshape(tl.permute(quarter, [1, 0, 2, 4, 3, 5]), [STEPS * WARPS, 32, 1])
    return tl.broadcast_to(quarter, [STEPS * WARPS, 32, 8])


@triton.jit
def unpack_row(words, zeros, like, ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr):
    """Unpack four quarters of blocks without their scales. zeros: one for each column of a quarter."""
    if ASM == "":
        wide = words.to(tl.int32)
        w0, w1 = ((wide & 15) - zeros).to(like.dtype), ((wide >> 4 & 15) - zeros).to(like.dtype)
        w2, w3 = ((wide >> 8 & 15) - zeros).to(like.dtype), ((wide >> 12 & 15) - zeros).to(like.dtype)
    else:
        added = offset(zeros, like.dtype, BASE, LIFT)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, added, added, added, added],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def _products(
    words, scales, row, like, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums of each warp's blocks, [WARPS, BLOCK_N, 8], with eight equal columns."""
    STRIPS: tl.constexpr = BLOCK_N // 16
    BATCH: tl.constexpr = STEPS * WARPS
    words = tl.reshape(words, [WARPS, STEPS, STRIPS, 2, 8, 4, 2, 2, 2])
    # step, warp, strip, eight of rows, r, half, t, eight of words, pair
    words = tl.reshape(tl.permute(words, [1, 0, 2, 6, 4, 3, 5, 7, 8]), [BATCH, BLOCK_N, 32])
    scales = tl.permute(tl.reshape(scales, [8, 4, WARPS, STEPS, STRIPS, 2]), [3, 2, 4, 5, 0, 1])
    zeros = tl.broadcast_to(tl.reshape(scales & 255, [BATCH, BLOCK_N, 1, 4, 1]), [BATCH, BLOCK_N, 2, 4, 4])
    w0, w1, w2, w3 = unpack_row(words, tl.reshape(zeros, [BATCH, BLOCK_N, 32]), like, ASM, BASE, LIFT)
    x0, x1, x2, x3 = quarters(row, WARPS, STEPS, PAIRS)
    part = tl.dot(w0, operand(x0, like, WARPS, STEPS, PAIRS), input_precision=PRECISION)
    part = tl.dot(w1, operand(x1, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    part = tl.dot(w2, operand(x2, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    part = tl.dot(w3, operand(x3, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    scale = (scales & ~255).to(tl.float32, bitcast=True) * LIFT
    scale = tl.broadcast_to(tl.reshape(scale, [BATCH, BLOCK_N, 4, 1]), [BATCH, BLOCK_N, 4, 2])
    part *= tl.reshape(scale, [BATCH, BLOCK_N, 8])
    return tl.sum(tl.reshape(part, [STEPS, WARPS, BLOCK_N, 8]), axis=0)


@keep_variants
@triton.jit
def int4_one_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [N], ADD only; may be out_ptr
    out_ptr,  # [N]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,  # at least 128
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of a warp
    PAIRS: tl.constexpr,  # whether two numbers are 4 bytes, and assembly may be used
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
    words, scales = _load_weights(words_ptr, scales_ptr, tile, N, BLOCKS, GROUP, BLOCK_N, WARPS, STEPS)
    if OVERLAP:
        gdc_wait()
    row = load_row(x_ptr, 0, K, WARPS, STEPS, PAIRS)
    like = tl.zeros([1], x_ptr.dtype.element_ty)
    acc = _products(words, scales, row, like, BLOCK_N, WARPS, STEPS, PAIRS, ASM, BASE, LIFT, PRECISION)
    result = tl.sum(tl.max(acc, axis=2), axis=0)[None, :]  # all columns are equal
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, 1)
    store_result(result, bias_ptr, residual_ptr, out_ptr, (row < 1)[:, None], row.to(tl.int64), n, N, BIAS, ADD)

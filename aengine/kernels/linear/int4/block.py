"""A tile of rows and a block of 128 columns: loads of words, scales and x, unpacking, and the product."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_scales(scales_ptr, block, n, MXFP4: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr):
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
def unpack(words, scales, like, MXFP4: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr):
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
def load_words(words_ptr, tile, block, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The words [BLOCK_N, 32] of a tile and a block, in the order of memory until they are in registers."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16).to(tl.int64)
    half, inner = tl.arange(0, 2)[:, None, None], tl.arange(0, 256)[None, None, :]
    words = tl.load(words_ptr + ((strip[None, :, None] * BLOCKS + block) * 512 + half * 256 + inner))
    words = tl.reshape(words, [2, BLOCK_N // 16, 8, 4, 2, 2, 2])  # half, tile, r, t, eight of rows, of words, pair
    return tl.reshape(tl.permute(words, [1, 4, 2, 0, 5, 3, 6]), [BLOCK_N, 32])


@triton.jit
def prefetch(words_ptr, tile, first, N: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, COUNT: tl.constexpr):
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
def load_x(x_columns, block, used, QUARTER: tl.constexpr, K: tl.constexpr):
    """A quarter of a block of x, [..., 32, M]; x_columns: of the first block."""
    c = tl.arange(0, 32)[:, None]
    k = block * 128 + QUARTER * 32 + c
    inside = used & (k < K) if K % 128 else used
    return tl.load(x_columns + k, mask=inside, other=0.0)


@triton.jit
def add_block(
    acc, words, scales, x0, x1, x2, x3,
    MXFP4: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, M] plus the product of a block of weights [BLOCK_N, 128] with quarters of x [32, M].

    All of them may have a leading axis.
    """
    w0, w1, w2, w3 = unpack(words, scales, x0, MXFP4, SCALED, ASM, BASE)
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

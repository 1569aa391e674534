"""A block of 128 columns of 4-bit codes: loads of words, scales and x, unpacking, and the product.

Words of four codes become numbers by the assembly of `unpacking`. Its operand $4 holds two neighbouring words; $0 to $3
become the pairs of numbers of their four quarters.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class _Narrow:
    """The bits of a 16-bit type, for two numbers in one register."""

    pair: str
    e2m1_power: str  # the missing power of two, if a number has e2m1's bits across exponent and mantissa
    lift: float  # the same power
    # Of NVFP4: a scale's byte times `scale_step`, plus half of the bits of `scale_base`, is 2 ** -10 times that power
    # times the scale. `scale_base` has these bits twice.
    scale_step: int
    scale_base: int


_NARROW = {
    torch.bfloat16: _Narrow("bf16x2", "0x7e807e80", 2.0**126, 1 << 4, 0x74807480),
    torch.float16: _Narrow("f16x2", "0x74007400", 2.0**14, 1 << 7, 0x24002400),
}
_MINUS_ZERO = "0x80008000"


@dataclass(frozen=True, slots=True)
class Unpacking:
    """How words of codes become numbers.

    assembly: empty for arithmetic in Triton. base: subtracted from an int4 code besides its zero; of NVFP4:
    `scale_base`. lift: the power of two that numbers lack before they are scaled; of NVFP4: `scale_step`.
    """

    assembly: str
    base: int
    lift: float


@lru_cache
def unpacking(dtype: torch.dtype, e2m1: bool, group: int, scaled: bool, bare: bool = False) -> Unpacking:
    """Return how codes become numbers of this dtype.

    scaled: the numbers are multiplied by the last four operands. bare: 4-bit floats lack `lift`, as those of int4
    do; otherwise they are multiplied by it. If numbers of NVFP4 are scaled, the scales have that power in them. The
    assembly then reads the first of two neighbours' scales, so neighbours in a register must be of one group.
    """
    narrow = _NARROW.get(dtype)
    if narrow is None:
        return Unpacking("", 0, 1.0)
    if group == 16 and scaled:
        lines = e2m1_numbers(narrow.pair == "f16x2", "$4", [f"${i}" for i in range(4)])
        lines += [f"fma.rn.{narrow.pair} ${i}, ${i}, ${5 + 2 * i}, minus_zero;" for i in range(4)]
        return Unpacking("\n".join(("{", *_registers(narrow), *lines, "}")), narrow.scale_base, narrow.scale_step)
    if e2m1:
        lines, base, lift = _e2m1(narrow, bare), 0, narrow.lift if bare else 1.0
    elif dtype == torch.bfloat16:
        lines, base, lift = _int4_in_place(), 0, 2.0**16
    else:
        lines, base, lift = _int4(), 1024, 1.0
    if scaled:
        lines += [f"fma.rn.{narrow.pair} ${i}, ${i}, ${9 + i}, minus_zero;" for i in range(4)]
    return Unpacking("\n".join(("{", *_registers(narrow), *lines, "}")), base, lift)


def _registers(narrow: _Narrow) -> list[str]:
    """Declare a scratch register and constants, because a multiply-add takes no immediate operands."""
    constants = {
        "one": "0x3c003c00", "low": "0x7a007a00", "high": "0x78007800",
        "power": narrow.e2m1_power, "minus_zero": _MINUS_ZERO,
    }  # fmt: skip
    return [f".reg .b32 t, {', '.join(constants)};", *(f"mov.b32 {name}, {bits};" for name, bits in constants.items())]


def _int4_in_place() -> list[str]:
    """In a bf16 number with exponent 0, bits 0 to 7 count in steps of 2**-133; bit 7 is the last bit of the exponent.

    So codes are numbers in their places; only those of the upper byte are shifted. One multiply-add scales them to
    steps of 2**-16 and subtracts their zero. Operands $5 to $8 are the quarters' -zero * 2**-16.
    """
    lines = []
    for i in range(4):
        if i == 2:
            lines.append("shr.u32 t, $4, 8;")
        lines.append(f"and.b32 ${i}, {'t' if i > 1 else '$4'}, {'0x00f000f0' if i % 2 else '0x000f000f'};")
        lines.append(f"fma.rn.bf16x2 ${i}, ${i}, {'high' if i % 2 else 'low'}, ${5 + i};")
    return lines


def _int4() -> list[str]:
    """Two instructions put two codes into the mantissa of 1024. A third one subtracts 1024 and the zero.

    Operands $5 to $8 are the quarters' -(1024 + zero). In float16, numbers with exponent 0 have too little range.
    """
    lines = []
    for i in range(4):
        shifted = "t" if i else "$4"
        if i:
            lines.append(f"shr.u32 t, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {shifted}, 0x000f000f, 0x64006400, 0xEA;")
        lines.append(f"fma.rn.f16x2 ${i}, ${i}, one, ${5 + i};")
    return lines


def _e2m1(narrow: _Narrow, bare: bool) -> list[str]:
    lines = e2m1_numbers(narrow.pair == "f16x2", "$4", [f"${i}" for i in range(4)])
    if not bare:
        lines += [f"fma.rn.{narrow.pair} ${i}, ${i}, power, minus_zero;" for i in range(4)]
    return lines


def e2m1_numbers(half: bool, words: str, numbers: Sequence[str]) -> list[str]:
    """Return assembly that moves codes' bits to where they are numbers, maybe subnormal, that lack a power of two.

    `spread` has put the bits of three quarters where a bfloat16 number has them, up to a shift. The last quarter takes
    three steps.

    Args:
        half: for float16.
        words: the register of two words.
        numbers: registers for the pairs of numbers of the four quarters. `t` is a scratch register.
    """
    first, second, third, last = numbers
    lines = [f"shl.b32 t, {words}, 6;", f"and.b32 {first}, t, 0x81c081c0;"]
    lines += [f"shl.b32 t, {words}, 3;", f"and.b32 {second}, t, 0x81c081c0;", f"and.b32 {third}, {words}, 0x81c081c0;"]
    lines += [f"shr.u32 t, {words}, 3;", f"and.b32 {last}, t, 0x01800180;"]
    lines += [f"shr.u32 t, {words}, 7;", f"lop3.b32 {last}, t, 0x00400040, {last}, 0xEA;"]
    lines += [f"shl.b32 t, {words}, 1;", f"lop3.b32 {last}, t, {_MINUS_ZERO}, {last}, 0xEA;"]
    for number in numbers if half else ():  # its exponent begins three bits further up
        lines += [f"shl.b32 t, {number}, 3;", "and.b32 t, t, 0x0e000e00;"]
        lines.append(f"lop3.b32 {number}, {number}, {_MINUS_ZERO}, t, 0xEA;")
    return lines


@triton.jit
def load_scales(scales_ptr, block, n, E2M1: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr):
    """Load the words [BLOCK_N] with the scales of a block's four quarters. Quarters of one group share a word.

    NVFP4: [BLOCK_N, 2], because each half of a quarter has a scale.
    """
    if GROUP == 16:
        first = tl.load(scales_ptr + (tl.expand_dims(2 * block * N + n, -1) + tl.arange(0, 2) * N))
        second, third, fourth = first, first, first
    elif E2M1:
        first = tl.load(scales_ptr + block * N + n)
        second, third, fourth = first, first, first
    else:
        first = tl.load(scales_ptr + block * 128 // GROUP * N + n)
        second = tl.load(scales_ptr + (block * 128 + 32) // GROUP * N + n) if GROUP < 64 else first
        third = tl.load(scales_ptr + (block * 128 + 64) // GROUP * N + n) if GROUP < 128 else first
        fourth = tl.load(scales_ptr + (block * 128 + 96) // GROUP * N + n) if GROUP < 64 else third
    return first, second, third, fourth


@triton.jit
def _scale(word, QUARTER: tl.constexpr, E2M1: tl.constexpr, GROUP: tl.constexpr, LIFT: tl.constexpr):
    """[..., BLOCK_N] -> [..., BLOCK_N, 1] float32. NVFP4: [..., BLOCK_N, 2] -> [..., BLOCK_N, 2, 1]."""
    if GROUP == 16:
        scale = ((word >> (8 * QUARTER) & 255) << 20).to(tl.float32, bitcast=True) * 2.0**107
    else:
        bits = ((word >> (8 * QUARTER)) & 255) << 23 if E2M1 else word & ~255
        scale = bits.to(tl.float32, bitcast=True) * LIFT
    return tl.expand_dims(scale, -1)


@triton.jit
def scale_pairs(word, QUARTER: tl.constexpr, BASE: tl.constexpr, STEP: tl.constexpr):
    """Return scales of NVFP4, [..., 1] int32: each one twice in 16 bits, times the powers of two of `_Narrow`."""
    return tl.expand_dims((word >> (8 * QUARTER) & 255) * (STEP * 65537) + BASE, -1)


@triton.jit
def apply_factors(acc, scales_ptr, n, GROUP: tl.constexpr, BLOCKS: tl.constexpr, N: tl.constexpr):
    """Multiply sums [..., BLOCK_N, any] by the factors of their rows, which only NVFP4 has."""
    if GROUP == 16:
        factors = tl.load(scales_ptr + 2 * BLOCKS * N + n).to(tl.float32, bitcast=True)
        acc *= tl.expand_dims(factors, -1)
    return acc


@triton.jit
def offset(word, dtype: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr):
    """Return the number that the assembly adds to a code."""
    return ((-BASE - (word & 255)).to(tl.float32) * (1 / LIFT)).to(dtype)


@triton.jit
def e2m1(words, QUARTER: tl.constexpr):
    """Return the numbers of one quarter in float32. words: as `spread` makes them."""
    wide = words.to(tl.int32)
    if QUARTER < 3:
        magnitude, sign = wide >> (3 * QUARTER) & 7, wide >> (9 + 3 * QUARTER) & 1
    else:
        magnitude, sign = (wide >> 13 & 1) | (wide >> 9 & 6), wide >> 14 & 1
    number = (magnitude << 22).to(tl.float32, bitcast=True) * 2.0**126
    return tl.where(sign == 1, -number, number)


@triton.jit
def _plain(
    words, scale, QUARTER: tl.constexpr, E2M1: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Unpack one quarter without assembly, for any dtype and device."""
    if E2M1:
        number = e2m1(words, QUARTER)
    else:
        code = (words.to(tl.int32) >> (4 * QUARTER)) & 15
        number = (code - tl.expand_dims(scale & 255, -1)).to(tl.float32)
    if SCALED:
        number *= _scale(scale, QUARTER, E2M1, GROUP, 1.0)
    return number.to(dtype)


@triton.jit
def unpack(
    words, scales, like,
    E2M1: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """words [..., BLOCK_N, 32], scales as `load_scales` has them -> four quarters of a block [..., BLOCK_N, 32].

    like: a tensor of the dtype of the result.
    """
    if GROUP == 16:
        if len(words.shape) == 3:
            halves = tl.reshape(words, [words.shape[0], words.shape[1], 2, 16])
        else:
            halves = tl.reshape(words, [words.shape[0], 2, 16])
        w0, w1, w2, w3 = _unpack(halves, scales, like, E2M1, SCALED, GROUP, ASM, BASE, LIFT)
        w0, w1 = tl.reshape(w0, words.shape), tl.reshape(w1, words.shape)
        w2, w3 = tl.reshape(w2, words.shape), tl.reshape(w3, words.shape)
    else:
        w0, w1, w2, w3 = _unpack(words, scales, like, E2M1, SCALED, GROUP, ASM, BASE, LIFT)
    return w0, w1, w2, w3


@triton.jit
def _unpack(
    words, scales, like,
    E2M1: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Return the four quarters of a block. Words and scales have the same axes, of words the last one is split."""
    dtype: tl.constexpr = like.dtype
    if ASM == "":
        return (
            _plain(words, scales[0], 0, E2M1, SCALED, GROUP, dtype),
            _plain(words, scales[1], 1, E2M1, SCALED, GROUP, dtype),
            _plain(words, scales[2], 2, E2M1, SCALED, GROUP, dtype),
            _plain(words, scales[3], 3, E2M1, SCALED, GROUP, dtype),
        )
    if GROUP == 16:
        s0, s1 = scale_pairs(scales[0], 0, BASE, LIFT), scale_pairs(scales[1], 1, BASE, LIFT)
        s2, s3 = scale_pairs(scales[2], 2, BASE, LIFT), scale_pairs(scales[3], 3, BASE, LIFT)
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", [words, s0, s1, s2, s3],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    if E2M1:
        tl.static_assert(SCALED)
        o0, o1, o2, o3 = _offsets_of_none(dtype)
    else:
        o0 = tl.expand_dims(offset(scales[0], dtype, BASE, LIFT), -1)
        o1 = tl.expand_dims(offset(scales[1], dtype, BASE, LIFT), -1)
        o2 = tl.expand_dims(offset(scales[2], dtype, BASE, LIFT), -1)
        o3 = tl.expand_dims(offset(scales[3], dtype, BASE, LIFT), -1)
    if SCALED:
        s0, s1 = _scale(scales[0], 0, E2M1, GROUP, LIFT).to(dtype), _scale(scales[1], 1, E2M1, GROUP, LIFT).to(dtype)
        s2, s3 = _scale(scales[2], 2, E2M1, GROUP, LIFT).to(dtype), _scale(scales[3], 3, E2M1, GROUP, LIFT).to(dtype)
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
    """Load the words [BLOCK_N, 32] of a tile and a block. They keep the order of memory until they are in registers."""
    strip = tl.minimum(tile * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16), (N - 1) // 16)
    return load_strips(words_ptr, strip, block, BLOCKS, BLOCK_N)


@triton.jit
def load_strips(words_ptr, strip, block, BLOCKS: tl.constexpr, ROWS: tl.constexpr):
    """Load the words of any ROWS / 16 strips of 16 rows."""
    strip = strip.to(tl.int64)
    # Strips are the first axis. So each warp loads the words that it multiplies, and early words may stay in registers.
    half, inner = tl.arange(0, 2)[None, :, None], tl.arange(0, 256)[None, None, :]
    words = tl.load(words_ptr + ((strip[:, None, None] * BLOCKS + block) * 512 + half * 256 + inner))
    words = tl.reshape(words, [ROWS // 16, 2, 8, 4, 2, 2, 2])  # tile, half, r, t, eight of rows, of words, pair
    return tl.reshape(tl.permute(words, [0, 4, 2, 1, 5, 3, 6]), [ROWS, 32])


@triton.jit
def load_x(x_columns, block, used, QUARTER: tl.constexpr, K: tl.constexpr):
    """Load a quarter of a block of x, [..., 32, M]. x_columns: pointers into the first block."""
    c = tl.arange(0, 32)[:, None]
    k = block * 128 + QUARTER * 32 + c
    inside = used & (k < K) if K % 128 else used
    return tl.load(x_columns + k, mask=inside, other=0.0)


@triton.jit
def load_quarters(x_columns, block, used, K: tl.constexpr):
    """Load the four quarters of a block of x, each as `load_x` does."""
    x0, x1 = load_x(x_columns, block, used, 0, K), load_x(x_columns, block, used, 1, K)
    x2, x3 = load_x(x_columns, block, used, 2, K), load_x(x_columns, block, used, 3, K)
    return x0, x1, x2, x3


@triton.jit
def one_after_another(w0, w1, w2, w3, ROWS: tl.constexpr):
    """Join the quarters [ROWS, 32] of a block to [ROWS, 128]."""
    weights = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [ROWS, 32, 2, 2]
    return tl.reshape(tl.permute(weights, [0, 2, 3, 1]), [ROWS, 128])


@triton.jit
def add_block(
    acc, words, scales, x0, x1, x2, x3,
    E2M1: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr,
    ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of a block of weights [BLOCK_N, 128] and quarters of x [32, M] to acc [BLOCK_N, M].

    All of them may have a leading axis.
    """
    w0, w1, w2, w3 = unpack(words, scales, x0, E2M1, SCALED, GROUP, ASM, BASE, LIFT)
    if SCALED:
        acc = tl.dot(w0, x0, acc, input_precision=PRECISION)
        acc = tl.dot(w1, x1, acc, input_precision=PRECISION)
        acc = tl.dot(w2, x2, acc, input_precision=PRECISION)
        acc = tl.dot(w3, x3, acc, input_precision=PRECISION)
    else:
        part = tl.dot(w0, x0, input_precision=PRECISION)
        if GROUP < 64:
            acc += part * _scale(scales[0], 0, E2M1, GROUP, LIFT)
            part = tl.dot(w1, x1, input_precision=PRECISION)
        else:
            part = tl.dot(w1, x1, part, input_precision=PRECISION)
        if GROUP < 128:
            acc += part * _scale(scales[1], 1, E2M1, GROUP, LIFT)
            part = tl.dot(w2, x2, input_precision=PRECISION)
        else:
            part = tl.dot(w2, x2, part, input_precision=PRECISION)
        if GROUP < 64:
            acc += part * _scale(scales[2], 2, E2M1, GROUP, LIFT)
            part = tl.dot(w3, x3, input_precision=PRECISION)
        else:
            part = tl.dot(w3, x3, part, input_precision=PRECISION)
        acc += part * _scale(scales[3], 3, E2M1, GROUP, LIFT)
    return acc

"""FP8 codes of keys and values as operands of matrix products. See `aengine.kernels.kv_scales`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1e-37)  # the smallest scale; a scale of zero times a hidden score of -inf would be NaN

# Turns a register with two pairs of codes into two registers of two float16 each: the first codes, and the second.
PAIRS_ASM = """{
    .reg .b32 sorted;
    .reg .b16 first, second;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {first, second}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}"""


@triton.jit
def power_below(largest):
    """Return the largest power of two that is at most each number, float32 and >= 0. Returns 1 for zero."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000  # all ones if it is not finite
    return tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))


@triton.jit
def in_float16(q):
    """Return q [rows, dim] as float16, divided by a power of two for each row, and these powers [rows].

    Only elements that are tiny compared with the largest of their row lose bits. FP8 converts to float16
    in one instruction, to bfloat16 in several.
    """
    q = q.to(tl.float32)
    power = power_below(tl.max(tl.abs(q), axis=1))
    return (q / power[:, None]).to(tl.float16), power


@triton.jit
def pair_in_float16(q, more):
    """Like `in_float16`, for rows in two parts, [rows, dim] and [rows, more], with one power for both."""
    q, more = q.to(tl.float32), more.to(tl.float32)
    power = power_below(tl.maximum(tl.max(tl.abs(q), axis=1), tl.max(tl.abs(more), axis=1)))
    return (q / power[:, None]).to(tl.float16), (more / power[:, None]).to(tl.float16), power


@triton.jit
def code_pairs(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """Return the two FP8 numbers of each 16-bit pair. ASM: PAIRS_ASM if the GPU supports it, else ""."""
    if ASM != "":
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return _code(pairs, dtype), _code(pairs >> 8, dtype)


@triton.jit
def _code(pairs, dtype: tl.constexpr):
    return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def divisor(total, v_ptr, value_scale):
    """Return the divisor of a weighted sum of values or FP8 codes; 1 for a total of zero."""
    safe = tl.where(total == 0.0, 1.0, total)
    if v_ptr.dtype.element_ty.is_fp8():
        safe /= value_scale
    return safe


@triton.jit
def to_cache_dtype(x, inverse, dtype: tl.constexpr):
    """Return x in the cache's dtype: FP8 codes as in `encode`, else x itself. inverse: 1 / scale."""
    kept = x
    if dtype.is_fp8():
        wide = x.to(tl.float32)
        code = tl.clamp(wide * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        kept = tl.where(tl.abs(wide) == float("inf"), float("nan"), code).to(dtype)
    return kept

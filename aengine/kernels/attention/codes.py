"""FP8 codes of keys and values on their way into matrix products: see `aengine.kernels.kv_scales`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(1e-37)  # of a scale: zero times minus infinity, the score of what is hidden, is NaN

# Two neighbours' pairs of codes in one register become two registers of two float16 each.
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
    """The power of two that brings each number [rows] float32, none below zero, between 1 and 2; 1 for what is zero."""
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000  # all ones where one is not finite
    return tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))


@triton.jit
def in_float16(q):
    """q [rows, dim] bfloat16 -> float16, exactly but for what is tiny beside its row's largest, and [rows] powers of
    two that it was divided by. FP8 becomes float16 in one instruction and bfloat16 in several."""
    q = q.to(tl.float32)
    power = power_below(tl.max(tl.abs(q), axis=1))
    return (q / power[:, None]).to(tl.float16), power


@triton.jit
def both_in_float16(q, more):
    """The same of rows in two parts, [rows, dim] and [rows, more], with one power for both."""
    q, more = q.to(tl.float32), more.to(tl.float32)
    power = power_below(tl.maximum(tl.max(tl.abs(q), axis=1), tl.max(tl.abs(more), axis=1)))
    return (q / power[:, None]).to(tl.float16), (more / power[:, None]).to(tl.float16), power


@triton.jit
def code_pairs(pairs, dtype: tl.constexpr, ASM: tl.constexpr):
    """The two FP8 numbers of each 16 bits of `pairs`; ASM: see PAIRS_ASM, "" without."""
    if ASM != "":
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return _code(pairs, dtype), _code(pairs >> 8, dtype)


@triton.jit
def _code(pairs, dtype: tl.constexpr):
    return (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def divisor(total, v_ptr, value_scale):
    """What a sum of weighted values, or of FP8 codes, is divided by."""
    safe = tl.where(total == 0.0, 1.0, total)
    if v_ptr.dtype.element_ty.is_fp8():
        safe /= value_scale
    return safe


@triton.jit
def as_kept(x, inverse, dtype: tl.constexpr):
    """What the cache keeps of x: as `encode` makes codes of an FP8 cache, or as it is."""
    kept = x
    if dtype.is_fp8():
        wide = x.to(tl.float32)
        code = tl.clamp(wide * inverse, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        kept = tl.where(tl.abs(wide) == float("inf"), float("nan"), code).to(dtype)
    return kept

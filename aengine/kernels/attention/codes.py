"""FP8 codes of keys and values on their way into matrix products: see `aengine.kernels.kv_scales`."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

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
def in_float16(q):
    """q [rows, dim] bfloat16 -> float16, exactly but for what is tiny beside its row's largest, and [rows] powers of
    two that it was divided by. FP8 becomes float16 in one instruction and bfloat16 in several."""
    q = q.to(tl.float32)
    exponent = tl.max(tl.abs(q), axis=1).to(tl.int32, bitcast=True) & 0x7F800000  # all ones where one is not finite
    power = tl.where(exponent == 0, 1.0, exponent.to(tl.float32, bitcast=True))
    return (q / power[:, None]).to(tl.float16), power


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

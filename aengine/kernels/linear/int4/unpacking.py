"""How words of four 4-bit codes become numbers: the assembly that `int4_product` puts into its kernels.

Operand $4 holds two neighbouring words; $0 to $3 become the pairs of numbers of their four quarters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class _Narrow:
    """The bits of a 16-bit type, for two numbers side by side."""

    pair: str
    e2m1_power: str  # what a number lacks that has the bits of e2m1 as last of the exponent and first of the mantissa
    lift: float  # the same


_NARROW = {
    torch.bfloat16: _Narrow("bf16x2", "0x7e807e80", 2.0**126),
    torch.float16: _Narrow("f16x2", "0x74007400", 2.0**14),
}
_MINUS_ZERO = "0x80008000"


@dataclass(frozen=True, slots=True)
class Unpacking:
    """assembly: empty where there is none. base: what is to be taken from an int4 code before its zero. lift: the power
    of two that numbers lack before they are scaled.
    """

    assembly: str
    base: int
    lift: float


@lru_cache
def unpacking(dtype: torch.dtype, mxfp4: bool, scaled: bool, bare: bool = False) -> Unpacking:
    """For numbers of this dtype; scaled: multiplied by the last four operands; bare: those of MXFP4 lack `lift` as
    int4's do, rather than to be multiplied by it first."""
    narrow = _NARROW.get(dtype)
    if narrow is None:
        return Unpacking("", 0, 1.0)
    if mxfp4:
        lines, base, lift = _e2m1(narrow, bare), 0, narrow.lift if bare else 1.0
    elif dtype == torch.bfloat16:
        lines, base, lift = _int4_in_place(), 0, 2.0**16
    else:
        lines, base, lift = _int4(), 1024, 1.0
    if scaled:
        lines += [f"fma.rn.{narrow.pair} ${i}, ${i}, ${9 + i}, minus_zero;" for i in range(4)]
    return Unpacking("\n".join(("{", *_registers(narrow), *lines, "}")), base, lift)


def _registers(narrow: _Narrow) -> list[str]:
    """A scratch register and constants: a multiply-add takes no immediate operands."""
    constants = {
        "one": "0x3c003c00", "low": "0x7a007a00", "high": "0x78007800",
        "power": narrow.e2m1_power, "minus_zero": _MINUS_ZERO,
    }  # fmt: skip
    return [f".reg .b32 t, {', '.join(constants)};", *(f"mov.b32 {name}, {bits};" for name, bits in constants.items())]


def _int4_in_place() -> list[str]:
    """Bits 0 to 7 of a bf16 number without exponent count in steps of 2**-133, the exponent's last bit included.

    So codes are numbers where they are, and only those of the upper byte are shifted. One instruction takes them to
    steps of 2**-16 and their zero away: operands $5 to $8 are the quarters' -zero * 2**-16.
    """
    lines = []
    for i in range(4):
        if i == 2:
            lines.append("shr.u32 t, $4, 8;")
        lines.append(f"and.b32 ${i}, {'t' if i > 1 else '$4'}, {'0x00f000f0' if i % 2 else '0x000f000f'};")
        lines.append(f"fma.rn.bf16x2 ${i}, ${i}, {'high' if i % 2 else 'low'}, ${5 + i};")
    return lines


def _int4() -> list[str]:
    """Two instructions bring two codes into the mantissa of 1024, the third takes it and the zero away.

    Operands $5 to $8 are the quarters' -(1024 + zero). Numbers without exponent have too little range in float16.
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
    """A code's bits go where they are a number, subnormal where it is one, that only lacks a power of two.

    `spread` has put them where a bfloat16 number has them, but for a shift; those of the last quarter take three.
    """
    lines = []
    for i, shift in enumerate((6, 3, 0)):
        if shift:
            lines.append(f"shl.b32 t, $4, {shift};")
        lines.append(f"and.b32 ${i}, {'t' if shift else '$4'}, 0x81c081c0;")
    lines += ["shr.u32 t, $4, 3;", "and.b32 $3, t, 0x01800180;"]
    lines += ["shr.u32 t, $4, 7;", "lop3.b32 $3, t, 0x00400040, $3, 0xEA;"]
    lines += ["shl.b32 t, $4, 1;", f"lop3.b32 $3, t, {_MINUS_ZERO}, $3, 0xEA;"]
    for i in range(4):
        if narrow.pair == "f16x2":  # whose exponent begins three bits further up
            lines += [f"shl.b32 t, ${i}, 3;", "and.b32 t, t, 0x0e000e00;"]
            lines.append(f"lop3.b32 ${i}, ${i}, {_MINUS_ZERO}, t, 0xEA;")
        if not bare:
            lines.append(f"fma.rn.{narrow.pair} ${i}, ${i}, power, minus_zero;")
    return lines

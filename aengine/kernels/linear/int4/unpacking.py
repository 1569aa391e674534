"""How words of four 4-bit codes become numbers: the assembly that `int4_product` puts into its kernels.

Operand $4 holds two neighbouring words; $0 to $3 become the pairs of numbers of their four quarters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class _Narrow:
    """The bits of a 16-bit type, for two numbers side by side. base: the power of two whose mantissa counts ones."""

    pair: str
    base: int
    magic: str  # base, twice
    one: str
    e2m1_shift: int  # from a code's bits 12 to 14 to the last of the exponent and the first of the mantissa
    e2m1_mask: str
    e2m1_power: str  # what such a number lacks


_NARROW = {
    torch.bfloat16: _Narrow("bf16x2", 128, "0x43004300", "0x3f803f80", 6, "0x01c001c0", "0x7e807e80"),
    torch.float16: _Narrow("f16x2", 1024, "0x64006400", "0x3c003c00", 3, "0x0e000e00", "0x74007400"),
}
_MINUS_ZERO = "0x80008000"


@dataclass(frozen=True, slots=True)
class Unpacking:
    """assembly: empty where there is none. base: what is to be taken from an int4 code before its zero."""

    assembly: str
    base: int


@lru_cache
def unpacking(dtype: torch.dtype, mxfp4: bool, scaled: bool) -> Unpacking:
    """For numbers of this dtype; scaled: multiplied by the last four operands."""
    narrow = _NARROW.get(dtype)
    if narrow is None:
        return Unpacking("", 0)
    lines = _e2m1(narrow) if mxfp4 else _int4(narrow)
    if scaled:
        lines += [f"fma.rn.{narrow.pair} ${i}, ${i}, ${9 + i}, minus_zero;" for i in range(4)]
    return Unpacking("\n".join(("{", *_registers(narrow), *lines, "}")), 0 if mxfp4 else narrow.base)


def _registers(narrow: _Narrow) -> list[str]:
    """A scratch register and constants: a multiply-add takes no immediate operands."""
    constants = {"one": narrow.one, "power": narrow.e2m1_power, "minus_zero": _MINUS_ZERO}
    return [f".reg .b32 t, {', '.join(constants)};", *(f"mov.b32 {name}, {bits};" for name, bits in constants.items())]


def _int4(narrow: _Narrow) -> list[str]:
    """Two instructions bring two codes into the mantissa of the base, the third takes it and the zero away.

    Operands $5 to $8 are the quarters' -(base + zero).
    """
    lines = []
    for i in range(4):
        shifted = "t" if i else "$4"
        if i:
            lines.append(f"shr.u32 t, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {shifted}, 0x000f000f, {narrow.magic}, 0xEA;")
        lines.append(f"fma.rn.{narrow.pair} ${i}, ${i}, one, ${5 + i};")
    return lines


def _e2m1(narrow: _Narrow) -> list[str]:
    """A code's bits go where they are a number, subnormal where it is one, that only lacks a power of two."""
    lines = []
    for i in range(4):
        lines.append(f"shl.b32 ${i}, $4, {12 - 4 * i};")
        lines.append(f"shr.u32 t, ${i}, {narrow.e2m1_shift};")
        lines.append(f"and.b32 t, t, {narrow.e2m1_mask};")
        lines.append(f"lop3.b32 ${i}, ${i}, {_MINUS_ZERO}, t, 0xEA;")
        lines.append(f"fma.rn.{narrow.pair} ${i}, ${i}, power, minus_zero;")
    return lines

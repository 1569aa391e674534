"""Assembly for a block of 128 columns of two strips of MXFP4, times a tile of 8 tokens, by a warp."""

from __future__ import annotations

LIFT = 126  # codes are multiplied without 2 ** 126, as in `int4.block`
# In this order: four sums of each strip, eight words of each, the scales of rows r and 8 + r of each (r is lane // 4),
# the address of x, and the sums before.
OPERANDS = ",".join(["=&f"] * 8 + ["r"] * 20 + ["l"] + ["f"] * 8)
WORDS, SCALES, X, BEFORE = 8, 24, 28, 29


def two_strips() -> str:
    """Return the assembly. A warp's operands are laid out as `mma.m16n8k16` takes them.

    The assembly itself loads x. So the compiler of assembly chooses when x takes registers.
    """
    lines = ["{", ".reg .b32 t, a<4>, s<2>, e<4>, x<4>;", ".reg .f32 q<4>;"]
    lines += [f"add.s32 e{row}, ${SCALES + row}, {LIFT * 0x01010101};" for row in range(4)]
    for quarter in range(4):
        lines.append(f"ld.global.v4.b32 {{x0, x1, x2, x3}}, [${X} + {512 * quarter}];")
        for strip in range(2):
            for half in range(2):
                # Rows r, 8 + r, r and 8 + r. The columns of the last two are 8 further on.
                for a, word in enumerate((0, 2, 1, 3)):
                    lines += _codes(quarter, f"${WORDS + 8 * strip + 4 * half + word}", f"a{a}")
                start = "q0, q1, q2, q3" if half else ", ".join(["0f00000000"] * 4)
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {q0, q1, q2, q3}, {a0, a1, a2, a3}, "
                    f"{{x{2 * half}, x{2 * half + 1}}}, {{{start}}};"
                )
            for row in range(2):
                bits = f"e{2 * strip + row}"
                by = f"shl.b32 s{row}, {bits}, {23 - 8 * quarter};" if quarter < 3 else f"shr.u32 s{row}, {bits}, 1;"
                lines += [by, f"and.b32 s{row}, s{row}, 0x7f800000;"]
            for i in range(4):
                to = 4 * strip + i
                lines.append(f"fma.rn.f32 ${to}, q{i}, s{i // 2}, ${to if quarter else BEFORE + to};")
    return "\n".join((*lines, "}"))


def _codes(quarter: int, word: str, to: str) -> list[str]:
    """Return assembly for the two numbers of a quarter, whose codes are spread as in `packed_codes.spread`."""
    if quarter == 2:
        return [f"and.b32 {to}, {word}, 0x81c081c0;"]
    if quarter < 2:
        return [f"shl.b32 t, {word}, {6 - 3 * quarter};", f"and.b32 {to}, t, 0x81c081c0;"]
    return [
        f"shr.u32 t, {word}, 3;", f"and.b32 {to}, t, 0x01800180;",
        f"shr.u32 t, {word}, 7;", f"lop3.b32 {to}, t, 0x00400040, {to}, 0xEA;",
        f"shl.b32 t, {word}, 1;", f"lop3.b32 {to}, t, 0x80008000, {to}, 0xEA;",
    ]  # fmt: skip

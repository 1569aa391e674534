"""Assembly of a candidate for tiles of MXFP4 experts, which `bench/packed_candidates.py` describes."""

from __future__ import annotations

from functools import lru_cache

LIFT = 126  # codes are multiplied without 2 ** 126


@lru_cache
def strip_product(groups: int, strips: int) -> tuple[str, str]:
    """Return assembly for a block of some strips in bfloat16 times a tile's tokens, and its operands.

    Sums of each strip, then eight words of each, the scales of rows r and 8 + r of each, the address of x, and the sums
    before. Codes become numbers that lack 2 ** 126, as in `int4.block`. The operands of a warp are laid out as
    `mma.m16n8k16` takes them. x is read here, so that the compiler chooses when its registers are taken.
    """
    sums = 4 * groups
    words = sums * strips
    scales = words + 8 * strips
    x = scales + 2 * strips
    lines = ["{", f".reg .b32 t, a<4>, s<2>, e<{2 * strips}>, x<{4 * groups}>;", f".reg .f32 q<{sums}>;"]
    lines += [f"add.s32 e{row}, ${scales + row}, {LIFT * 0x01010101};" for row in range(2 * strips)]
    for quarter in range(4):
        for group in range(groups):
            to = ", ".join(f"x{4 * group + i}" for i in range(4))
            lines.append(f"ld.global.v4.b32 {{{to}}}, [${x} + {512 * (quarter * groups + group)}];")
        for strip in range(strips):
            for half in range(2):
                # Rows r, 8 + r, r and 8 + r. The columns of the last two are 8 further on.
                for a, word in enumerate((0, 2, 1, 3)):
                    lines += _codes(quarter, f"${words + 8 * strip + 4 * half + word}", f"a{a}")
                for group in range(groups):
                    b = 4 * group + 2 * half
                    to = ", ".join(f"q{4 * group + i}" for i in range(4))
                    start = f"{{{to}}}" if half else "{" + ", ".join(["0f00000000"] * 4) + "}"
                    lines.append(
                        f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{to}}}, {{a0, a1, a2, a3}}, "
                        f"{{x{b}, x{b + 1}}}, {start};"
                    )
            for row in range(2):
                bits = f"e{2 * strip + row}"
                by = f"shl.b32 s{row}, {bits}, {23 - 8 * quarter};" if quarter < 3 else f"shr.u32 s{row}, {bits}, 1;"
                lines += [by, f"and.b32 s{row}, s{row}, 0x7f800000;"]
            for i in range(sums):
                to = strip * sums + i
                old = f"${to}" if quarter else f"${x + 1 + to}"
                lines.append(f"fma.rn.f32 ${to}, q{i}, s{i % 4 // 2}, {old};")
    operands = ["=&f"] * words + ["r"] * (10 * strips) + ["l"] + ["f"] * words
    return "\n".join((*lines, "}")), ",".join(operands)


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

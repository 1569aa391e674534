"""One row times a weight of int4 codes, streamed: for more programs than fit at once, and for longer rows.

A program owns 16 rows of the weight. Words go from memory into the registers from which tensor cores take them, some
blocks ahead. The row and the scales are in shared memory: loads that hit a cache queue after loads that go to memory,
and would take as long. The kernel is written in Gluon, Triton's language with explicit layouts, because it has to
choose which thread holds which word.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from aengine.kernels.variants import keep_variants

# Four sums, eight words, x of four quarters, and the offsets of rows r and 8 + r twice.
OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 28)


@gluon.jit
def load_block(words_ptr, strip, first, BLOCKS: gl.constexpr, WARPS: gl.constexpr, LANES: gl.constexpr):
    """Load a block for each warp: the words of its halves, two tensors [WARPS, r, t, eight of rows, eight of words]."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    block = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, FLAT)), 1) + first
    if BLOCKS % WARPS:
        block = gl.minimum(block, BLOCKS - 1)  # blocks after the end meet zeros of x
    inner = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, FLAT)), 0)
    at = words_ptr + (strip.to(gl.int64) * BLOCKS * 256 + block * 256 + inner)
    first_half = gl.reshape(gl.load(at), [WARPS, 8, 4, 2, 2])
    second_half = gl.reshape(gl.load(at + 128), [WARPS, 8, 4, 2, 2])
    return (
        gl.convert_layout(first_half, LANES, assert_trivial=True),
        gl.convert_layout(second_half, LANES, assert_trivial=True),
    )


@gluon.jit
def _load_quarters(row, WARPS: gl.constexpr, LANES: gl.constexpr):
    """row: in shared memory [WARPS, quarter, t, half, eight] -> each quarter [WARPS, 1, t, half, eight]."""
    ALL: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4, 1, 2, 2], [1, 8, 1, 4, 1, 1], [WARPS, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    ONE: gl.constexpr = gl.SliceLayout(1, LANES)
    x = gl.permute(row.load(gl.SliceLayout(1, ALL)), [0, 2, 3, 4, 1])
    even, odd = gl.split(gl.reshape(x, [WARPS, 4, 2, 2, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.expand_dims(gl.convert_layout(x0, ONE, assert_trivial=True), 1),
        gl.expand_dims(gl.convert_layout(x1, ONE, assert_trivial=True), 1),
        gl.expand_dims(gl.convert_layout(x2, ONE, assert_trivial=True), 1),
        gl.expand_dims(gl.convert_layout(x3, ONE, assert_trivial=True), 1),
    )


@gluon.jit
def _keep_scales(
    kept, scales_ptr, strip, like, N: gl.constexpr, BLOCKS: gl.constexpr, GROUP: gl.constexpr, PADDED: gl.constexpr,
    WARPS: gl.constexpr, BASE: gl.constexpr, LIFT: gl.constexpr,
):  # fmt: skip
    """Store a strip's scales and the offsets of its codes in `kept` [PADDED * WARPS, r, eight, 2]; 0 after the last
    block.
    """
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    place = gl.arange(0, PADDED * WARPS * 16, layout=FLAT)
    block, n = place // 16, strip * 16 + place % 16
    word = gl.load(scales_ptr + (block * 128 // GROUP * N + n), mask=(block < BLOCKS) & (n < N), other=0)
    scale = ((word & ~255).to(gl.float32, bitcast=True) * LIFT).to(gl.int32, bitcast=True)
    added = ((-BASE - (word & 255)).to(gl.float32) * (1 / LIFT)).to(like)
    pair = added.to(gl.int16, bitcast=True).to(gl.int32) & 65535
    both = gl.reshape(gl.join(scale, pair | (pair << 16)), [PADDED * WARPS, 2, 8, 2])
    kept.store(gl.permute(both, [0, 2, 1, 3]))


@gluon.jit
def _keep_row(row, x_ptr, K: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr):
    """Store x in `row` [blocks, quarter, t, half, eight], so that the numbers of one thread are contiguous."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    at = gl.arange(0, PADDED * WARPS * 64, layout=FLAT)
    x = gl.load(x_ptr + at, mask=at < K // 2, other=0)
    row.store(gl.permute(gl.reshape(x, [PADDED * WARPS, 4, 2, 2, 4]), [0, 1, 4, 2, 3]))


@keep_variants
@gluon.jit
def int4_streamed_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [N], ADD only; may be out_ptr
    out_ptr,  # [N]
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,  # at least 128
    WARPS: gl.constexpr,
    PADDED: gl.constexpr,  # a power of two: at least the blocks of a warp
    AHEAD: gl.constexpr,  # blocks of a warp in flight
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    ASM: gl.constexpr,  # `block_product`
    OPERANDS: gl.constexpr,
    BASE: gl.constexpr,
    LIFT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    EACH: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    strip = gl.program_id(0)
    words_ptr = words_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    if OVERLAP:
        control("griddepcontrol.launch_dependents;")
    ready = ()
    for step in gl.static_range(AHEAD):
        ready = ready + (load_block(words_ptr, strip, step * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005 (as above)
    kept = gl.allocate_shared_memory(
        gl.int32, [PADDED * WARPS, 8, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    _keep_scales(kept, scales_ptr, strip, x_ptr.dtype.element_ty, N, BLOCKS, GROUP, PADDED, WARPS, BASE, LIFT)
    if OVERLAP:
        control("griddepcontrol.wait;")
    row = gl.allocate_shared_memory(
        gl.int32, [PADDED * WARPS, 4, 4, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    _keep_row(row, x_ptr.to(gl.pointer_type(gl.int32), bitcast=True), K, PADDED, WARPS)
    acc = gl.zeros([WARPS, 8, 4, 2, 2], gl.float32, LANES)
    for step in gl.static_range(EACH):
        if step + AHEAD < EACH:
            ready = ready + (load_block(words_ptr, strip, (step + AHEAD) * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005
        first_half, second_half = ready[step]
        x0, x1, x2, x3 = _load_quarters(row.slice(step * WARPS, WARPS), WARPS, LANES)
        scale, added = gl.split(kept.slice(step * WARPS, WARPS).load(gl.SliceLayout(2, LANES)))  # [WARPS, r, eight]
        part = gl.inline_asm_elementwise(
            ASM, OPERANDS, [first_half, second_half, x0, x1, x2, x3, gl.expand_dims(gl.expand_dims(added, 3), 2)],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        acc += part * gl.expand_dims(gl.expand_dims(scale.to(gl.float32, bitcast=True), 3), 2)
    result = gl.sum(gl.split(acc)[0], 0)  # constant along t and along the last axis
    store_strip(
        result, bias_ptr, residual_ptr, out_ptr, strip, N, BIAS, ADD, gl.SliceLayout(0, gl.SliceLayout(4, LANES))
    )


@gluon.jit
def control(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_strip(
    result, bias_ptr, residual_ptr, out_ptr, strip, N: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    RESULT: gl.constexpr,
):  # fmt: skip
    """Store the results of 16 rows, [r, t, eight] in the layout RESULT, which are constant along t."""
    n = strip_rows(strip, RESULT)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, RESULT)))
    mine = (gl.expand_dims(gl.expand_dims(t, 0), 2) == 0) & (n < N)
    if BIAS:
        result += gl.load(bias_ptr + n, mask=mine, other=0.0).to(gl.float32)
    if ADD:
        result += gl.load(residual_ptr + n, mask=mine, other=0.0).to(gl.float32)
    gl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=mine)


@gluon.jit
def strip_rows(strip, RESULT: gl.constexpr):
    """Return the numbers of the rows of a strip, [r, t, eight]."""
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, RESULT)))
    eight = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, RESULT)))
    n = gl.expand_dims(gl.expand_dims(eight, 0), 1) * 8 + gl.expand_dims(gl.expand_dims(r, 1), 2)
    return strip * 16 + n + gl.zeros([8, 4, 2], gl.int32, RESULT)


@lru_cache
def block_product(dtype: torch.dtype) -> str:
    """Return assembly for 16 rows of a block times the row: eight products of tensor cores with eight equal right
    columns.

    Codes become numbers as in `unpacking`; in float16 every other quarter has a sixteenth. The operands of a warp are
    laid out as `mma.m16n8k16` takes them: rows r and 8 + r, and of each half of a quarter the columns 2t, 2t + 1 and
    those 8 further on.
    """
    half = dtype == torch.float16
    kind, pair, ones, sixteenths = ("f16", "f16x2", "0x3c003c00", "0x2c002c00") if half else (
        "bf16", "bf16x2", "0x7a007a00", "0x78007800"
    )  # fmt: skip
    lines = ["{", ".reg .b32 t<8>, a<4>, o<4>, even, odd;", f"mov.b32 even, {ones};", f"mov.b32 odd, {sixteenths};"]
    for row in range(2):
        lines.append(f"mov.b32 o{row}, ${28 + 2 * row};")
        # In float16, codes are in the mantissa of 1024. The odd quarters keep a sixteenth of it, so 960 is missing.
        lines.append(
            f"{{ .reg .b32 less; mov.b32 less, 0x63806380; add.rn.f16x2 o{2 + row}, o{row}, less; }}"
            if half
            else f"mov.b32 o{2 + row}, o{row};"
        )
    lines += [f"shr.u32 t{i}, ${4 + i}, 8;" for i in range(8)]
    for quarter in range(4):
        mask = "0x00f000f0" if quarter % 2 else "0x000f000f"
        for part in range(2):
            for a, (row, eight) in enumerate(((0, 0), (1, 0), (0, 1), (1, 1))):
                at = 4 * part + 2 * row + eight
                word = f"t{at}" if quarter > 1 else f"${4 + at}"
                code = f"lop3.b32 a{a}, {word}, {mask}, 0x64006400, 0xEA;" if half else f"and.b32 a{a}, {word}, {mask};"
                number = f"fma.rn.{pair} a{a}, a{a}, {'odd' if quarter % 2 else 'even'}, o{2 * (quarter % 2) + row};"
                lines += [code, number]
            x = 12 + 4 * quarter + 2 * part
            before = "{$0, $1, $2, $3}" if quarter or part else "{0f00000000, 0f00000000, 0f00000000, 0f00000000}"
            lines.append(
                f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{a0, a1, a2, a3}}, "
                f"{{${x}, ${x + 1}}}, {before};"
            )
    return "\n".join((*lines, "}"))

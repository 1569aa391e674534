"""The product of a single row whose programs are more than fit, or have more columns than registers hold.

A program owns 16 rows of the weight, each of its warps every WARPS-th block of them. Words go straight from memory
into the registers from which tensor cores take them, some blocks ahead. The row and the scales lie in shared memory:
loads that hit a cache stand in the same queue as those that go to memory, and would take as long.

Written in Gluon, Triton's language with layouts, because which thread has which word is the point.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from aengine.kernels.variants import keep_variants

# Four sums, eight words, x of four quarters, offsets of rows r and 8 + r, each twice.
OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 28)


@gluon.jit
def _load_block(words_ptr, strip, first, BLOCKS: gl.constexpr, WARPS: gl.constexpr, LANES: gl.constexpr):
    """A block for each warp: the words of its halves, two tensors [WARPS, r, t, eight of rows, eight of words]."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    block = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, FLAT)), 1) + first
    if BLOCKS % WARPS:
        block = gl.minimum(block, BLOCKS - 1)  # what lies beyond meets zeros of x
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
    """row: in shared memory [WARPS, quarter, t, half, eight]. For each quarter [WARPS, 1, t, half, eight]."""
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
    """Scales, and what is added to codes, of a strip into `kept` [PADDED * WARPS, r, eight, 2]; 0 beyond the blocks."""
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
    """x into `row` [blocks, quarter, t, half, eight], in which what a thread multiplies is in one piece."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    at = gl.arange(0, PADDED * WARPS * 64, layout=FLAT)
    x = gl.load(x_ptr + at, mask=at < K // 2, other=0)
    row.store(gl.permute(gl.reshape(x, [PADDED * WARPS, 4, 2, 2, 4]), [0, 1, 4, 2, 3]))


@keep_variants
@gluon.jit
def int4_streamed_row_kernel(
    x_ptr,  # this and what follows as in `one_row`
    words_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    WARPS: gl.constexpr,
    PADDED: gl.constexpr,  # a power of two: at least the blocks of a warp
    AHEAD: gl.constexpr,  # blocks of a warp that are on their way
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
        _control("griddepcontrol.launch_dependents;")
    ready = ()
    for step in gl.static_range(AHEAD):
        ready = ready + (_load_block(words_ptr, strip, step * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005 (as in one_row)
    kept = gl.allocate_shared_memory(
        gl.int32, [PADDED * WARPS, 8, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    _keep_scales(kept, scales_ptr, strip, x_ptr.dtype.element_ty, N, BLOCKS, GROUP, PADDED, WARPS, BASE, LIFT)
    if OVERLAP:
        _control("griddepcontrol.wait;")
    row = gl.allocate_shared_memory(
        gl.int32, [PADDED * WARPS, 4, 4, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0])
    )
    _keep_row(row, x_ptr.to(gl.pointer_type(gl.int32), bitcast=True), K, PADDED, WARPS)
    acc = gl.zeros([WARPS, 8, 4, 2, 2], gl.float32, LANES)
    for step in gl.static_range(EACH):
        if step + AHEAD < EACH:
            ready = ready + (_load_block(words_ptr, strip, (step + AHEAD) * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005
        first_half, second_half = ready[step]
        x0, x1, x2, x3 = _load_quarters(row.slice(step * WARPS, WARPS), WARPS, LANES)
        scale, added = gl.split(kept.slice(step * WARPS, WARPS).load(gl.SliceLayout(2, LANES)))  # [WARPS, r, eight]
        part = gl.inline_asm_elementwise(
            ASM, OPERANDS, [first_half, second_half, x0, x1, x2, x3, gl.expand_dims(gl.expand_dims(added, 3), 2)],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        acc += part * gl.expand_dims(gl.expand_dims(scale.to(gl.float32, bitcast=True), 3), 2)
    _write(acc, bias_ptr, residual_ptr, out_ptr, strip, N, BIAS, ADD, LANES)


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _write(
    acc, bias_ptr, residual_ptr, out_ptr, strip, N: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """acc [WARPS, r, t, eight, 2], of which all t and both of the last axis are the same."""
    RESULT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(4, LANES))  # [r, t, eight]
    r = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, RESULT)))
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, RESULT)))
    eight = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, RESULT)))
    t = gl.expand_dims(gl.expand_dims(t, 0), 2)
    n = strip * 16 + gl.expand_dims(gl.expand_dims(eight, 0), 1) * 8 + gl.expand_dims(gl.expand_dims(r, 1), 2) + 0 * t
    mine = (t == 0) & (n < N)
    result = gl.sum(gl.split(acc)[0], 0)
    if BIAS:
        result += gl.load(bias_ptr + n, mask=mine, other=0.0).to(gl.float32)
    if ADD:
        result += gl.load(residual_ptr + n, mask=mine, other=0.0).to(gl.float32)
    gl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=mine)


@lru_cache
def block_product(dtype: torch.dtype) -> str:
    """Assembly: 16 rows of a block times the row, by eight products of tensor cores whose right columns are all alike.

    Codes become numbers as in `unpacking`, for float16 with a sixteenth for every other quarter. A warp's operands lie
    as `mma.m16n8k16` wants them: its rows r and 8 + r, of each half of a quarter columns 2t, 2t + 1 and 8 further on.
    """
    half = dtype == torch.float16
    kind, pair, ones, sixteenths = ("f16", "f16x2", "0x3c003c00", "0x2c002c00") if half else (
        "bf16", "bf16x2", "0x7a007a00", "0x78007800"
    )  # fmt: skip
    lines = ["{", ".reg .b32 t<8>, a<4>, o<4>, even, odd;", f"mov.b32 even, {ones};", f"mov.b32 odd, {sixteenths};"]
    for row in range(2):
        lines.append(f"mov.b32 o{row}, ${28 + 2 * row};")
        # In float16 codes lie in the mantissa of 1024, of which the odd quarters keep a sixteenth: 960 less.
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

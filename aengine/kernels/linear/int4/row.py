"""One row times a weight of 4-bit codes.

`int4_one_row_kernel`: a program owns BLOCK_N rows of the weight, each of its warps every WARPS-th block of them. All of
its weights are in flight before it waits for the row. Only x and the sums of the warps move between threads. That pays
if all weights fit into registers at once.

`int4_streamed_row_kernel` is for more programs than fit, or for longer rows. A program owns 16 rows of the weight.
Words go from memory into the registers from which tensor cores take them, some blocks ahead. The row and the scales are
in shared memory: loads that hit a cache queue after loads that go to memory, and would take as long. The kernel is
written in Gluon, Triton's language with explicit layouts, because it has to choose which thread holds which word.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.finish import store_result
from aengine.kernels.linear.int4.block import offset
from aengine.kernels.variants import keep_variants

# Four sums, eight words, x of four quarters, and the offsets of rows r and 8 + r twice.
OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 28)


@triton.jit
def _load_weights(
    words_ptr, scales_ptr, tile, N: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Load WARPS * STEPS blocks of a tile: words [WARPS, STEPS, strips, 2, 256], scales [32, WARPS, STEPS, strips, 2].

    The order of the axes gives each lane of each warp the numbers that it multiplies.
    """
    STRIPS: tl.constexpr = BLOCK_N // 16
    warp, step, strip = tl.arange(0, WARPS), tl.arange(0, STEPS), tile * STRIPS + tl.arange(0, STRIPS)
    block = warp[:, None, None, None, None] + WARPS * step[None, :, None, None, None]
    half, inner = tl.arange(0, 2)[None, None, None, :, None], tl.arange(0, 256)[None, None, None, None, :]
    start = (tl.minimum(strip, (N - 1) // 16).to(tl.int64)[None, None, :, None, None] * BLOCKS + block) * 512
    words = tl.load(words_ptr + (start + half * 256 + inner), mask=block < BLOCKS, other=0)
    block = warp[None, :, None, None, None] + WARPS * step[None, None, :, None, None]
    lane, eight = tl.arange(0, 32)[:, None, None, None, None], tl.arange(0, 2)[None, None, None, None, :]
    n = tl.minimum(strip[None, None, None, :, None] * 16 + eight * 8 + lane // 4, N - 1)
    scales = tl.load(scales_ptr + (block * 128 // GROUP * N + n), mask=block < BLOCKS, other=0)
    return words, scales


@triton.jit
def load_row(row_ptr, first, K: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Load blocks of a row, [WARPS, STEPS, 128], or as pairs of numbers in words, [WARPS, STEPS, 64] int32."""
    block = first + tl.arange(0, WARPS)[:, None, None] + WARPS * tl.arange(0, STEPS)[None, :, None]
    if PAIRS:
        place = block * 64 + tl.arange(0, 64)[None, None, :]
        row = tl.load(row_ptr.to(tl.pointer_type(tl.int32)) + place, mask=place < K // 2, other=0)
    else:
        place = block * 128 + tl.arange(0, 128)[None, None, :]
        row = tl.load(row_ptr + place, mask=place < K, other=0.0)
    return row


@triton.jit
def parted(words, like):
    return tl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(like.dtype, like.dtype), is_pure=True, pack=1
    )


@triton.jit
def quarters(row, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Split a row's blocks into four tensors [WARPS, STEPS, 32], or of 16 words."""
    row = tl.reshape(row, [WARPS, STEPS, 2, 2, 16 if PAIRS else 32])
    even, odd = tl.split(tl.permute(row, [0, 1, 4, 3, 2]))
    first, second = tl.split(even)
    third, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def operand(quarter, like, WARPS: tl.constexpr, STEPS: tl.constexpr, PAIRS: tl.constexpr):
    """Make a quarter the right operand [STEPS * WARPS, 32, 8]: the same column eight times.

    Its rows are ordered so that those of one thread are neighbours, as the columns of the weights are.
    """
    if PAIRS:
        low, high = parted(quarter, like)
        quarter = tl.join(low, high)
    quarter = tl.reshape(quarter, [WARPS, STEPS, 2, 2, 4, 2])  # warp, step, half, eight, t, pair
    quarter = tl.reshape(tl.permute(quarter, [1, 0, 2, 4, 3, 5]), [STEPS * WARPS, 32, 1])
    return tl.broadcast_to(quarter, [STEPS * WARPS, 32, 8])


@triton.jit
def unpack_row(words, zeros, like, ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr):
    """Unpack four quarters of blocks without their scales. zeros: one for each column of a quarter."""
    if ASM == "":
        wide = words.to(tl.int32)
        w0, w1 = ((wide & 15) - zeros).to(like.dtype), ((wide >> 4 & 15) - zeros).to(like.dtype)
        w2, w3 = ((wide >> 8 & 15) - zeros).to(like.dtype), ((wide >> 12 & 15) - zeros).to(like.dtype)
    else:
        added = offset(zeros, like.dtype, BASE, LIFT)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r,r,r", [words, added, added, added, added],
            dtype=(like.dtype, like.dtype, like.dtype, like.dtype), is_pure=True, pack=2,
        )  # fmt: skip
    return w0, w1, w2, w3


@triton.jit
def _products(
    words, scales, row, like, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr,
    PAIRS: tl.constexpr, ASM: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sums of each warp's blocks, [WARPS, BLOCK_N, 8], with eight equal columns."""
    STRIPS: tl.constexpr = BLOCK_N // 16
    BATCH: tl.constexpr = STEPS * WARPS
    words = tl.reshape(words, [WARPS, STEPS, STRIPS, 2, 8, 4, 2, 2, 2])
    # step, warp, strip, eight of rows, r, half, t, eight of words, pair
    words = tl.reshape(tl.permute(words, [1, 0, 2, 6, 4, 3, 5, 7, 8]), [BATCH, BLOCK_N, 32])
    scales = tl.permute(tl.reshape(scales, [8, 4, WARPS, STEPS, STRIPS, 2]), [3, 2, 4, 5, 0, 1])
    zeros = tl.broadcast_to(tl.reshape(scales & 255, [BATCH, BLOCK_N, 1, 4, 1]), [BATCH, BLOCK_N, 2, 4, 4])
    w0, w1, w2, w3 = unpack_row(words, tl.reshape(zeros, [BATCH, BLOCK_N, 32]), like, ASM, BASE, LIFT)
    x0, x1, x2, x3 = quarters(row, WARPS, STEPS, PAIRS)
    part = tl.dot(w0, operand(x0, like, WARPS, STEPS, PAIRS), input_precision=PRECISION)
    part = tl.dot(w1, operand(x1, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    part = tl.dot(w2, operand(x2, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    part = tl.dot(w3, operand(x3, like, WARPS, STEPS, PAIRS), part, input_precision=PRECISION)
    scale = (scales & ~255).to(tl.float32, bitcast=True) * LIFT
    scale = tl.broadcast_to(tl.reshape(scale, [BATCH, BLOCK_N, 4, 1]), [BATCH, BLOCK_N, 4, 2])
    part *= tl.reshape(scale, [BATCH, BLOCK_N, 8])
    return tl.sum(tl.reshape(part, [STEPS, WARPS, BLOCK_N, 8]), axis=0)


@keep_variants
@triton.jit
def int4_one_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # [tiles of 16 rows, blocks, 512] int16
    scales_ptr,  # [groups, N] int32
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [N], ADD only; may be out_ptr
    out_ptr,  # [N]
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,  # at least 128
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of a warp
    PAIRS: tl.constexpr,  # whether two numbers are 4 bytes, and assembly may be used
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    if OVERLAP:
        gdc_launch_dependents()
    words, scales = _load_weights(words_ptr, scales_ptr, tile, N, BLOCKS, GROUP, BLOCK_N, WARPS, STEPS)
    if OVERLAP:
        gdc_wait()
    row = load_row(x_ptr, 0, K, WARPS, STEPS, PAIRS)
    like = tl.zeros([1], x_ptr.dtype.element_ty)
    acc = _products(words, scales, row, like, BLOCK_N, WARPS, STEPS, PAIRS, ASM, BASE, LIFT, PRECISION)
    result = tl.sum(tl.max(acc, axis=2), axis=0)[None, :]  # all columns are equal
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, 1)
    store_result(result, bias_ptr, residual_ptr, out_ptr, (row < 1)[:, None], row.to(tl.int64), n, N, BIAS, ADD)


@gluon.jit
def _load_block(words_ptr, strip, first, BLOCKS: gl.constexpr, WARPS: gl.constexpr, LANES: gl.constexpr):
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
    x_ptr,  # this and the next five: as above
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
        _control("griddepcontrol.launch_dependents;")
    ready = ()
    for step in gl.static_range(AHEAD):
        ready = ready + (_load_block(words_ptr, strip, step * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005 (as above)
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
    _store_streamed(acc, bias_ptr, residual_ptr, out_ptr, strip, N, BIAS, ADD, LANES)


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION + " // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_streamed(
    acc, bias_ptr, residual_ptr, out_ptr, strip, N: gl.constexpr, BIAS: gl.constexpr, ADD: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """Store acc [WARPS, r, t, eight, 2], which is constant along t and along the last axis."""
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

"""One row times a weight of NVFP4, streamed as in `int4.streamed_row`.

A half of a quarter of a block is one group and one product of the tensor cores: 16 rows times 16 columns. The right
operand has eight columns. The product of each of a block's eight groups uses one of them: that column has x, the others
have zeros. So the sums of the groups stay apart, four in each thread, and are scaled afterwards.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from functools import lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from aengine.kernels.linear.int4.block import e2m1_numbers
from aengine.kernels.linear.int4.streamed_row import control, load_block, store_strip, strip_rows
from aengine.kernels.variants import keep_variants

OPERANDS = ",".join(["=&f"] * 4 + ["r"] * 12)  # four sums, eight words, and x of the thread's group twice


@gluon.jit
def _keep_scales(
    kept, scales_ptr, strip, N: gl.constexpr, BLOCKS: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr
):
    """Store the words with a strip's scales in `kept` [PADDED * WARPS, r, eight, half]."""
    FLAT: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    place = gl.arange(0, PADDED * WARPS * 16, layout=FLAT)
    block, n = place // 16, strip * 16 + place % 16
    inside = (block < BLOCKS) & (n < N)
    first = gl.load(scales_ptr + (2 * block * N + n), mask=inside, other=0)
    second = gl.load(scales_ptr + (2 * block * N + N + n), mask=inside, other=0)
    kept.store(gl.permute(gl.reshape(gl.join(first, second), [PADDED * WARPS, 2, 8, 2]), [0, 2, 1, 3]))


@gluon.jit
def _load_scales(kept, WARPS: gl.constexpr, SCALE: gl.constexpr, LANES: gl.constexpr):
    """kept: as above, of a block for each warp -> the scales of quarter t, [WARPS, r, t, eight, half] float32."""
    words = gl.expand_dims(kept.load(gl.SliceLayout(2, LANES)), 2)
    t = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, gl.SliceLayout(4, LANES)))))
    t = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(t, 0), 0), 3), 4)
    chosen = 0x4044 | t << 8  # the bytes of the result: 0, 0, byte t of the word, 0
    scales = gl.inline_asm_elementwise(SCALE, "=r,r,r", [words, chosen], dtype=gl.int32, is_pure=True, pack=1)
    return scales.to(gl.float32, bitcast=True)


@gluon.jit
def _keep_row(row, x_ptr, K: gl.constexpr, PADDED: gl.constexpr, WARPS: gl.constexpr, LIFTED: gl.constexpr):
    """Store x in `row` [PADDED * WARPS, group, eight, t], times a power of two by the assembly LIFTED."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    at = gl.arange(0, PADDED * WARPS * 64, layout=FLAT)
    x = gl.load(x_ptr + at, mask=at < K // 2, other=0)
    if LIFTED != "":
        x = gl.inline_asm_elementwise(LIFTED, "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)
    row.store(gl.reshape(x, [PADDED * WARPS, 8, 2, 4]))


@keep_variants
@gluon.jit
def nvfp4_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # [tiles of 16 rows, BLOCKS, 512] int16
    scales_ptr,  # [2 * BLOCKS + 1, N] int32, as in `PackedCodes`
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [N], ADD only; may be out_ptr
    out_ptr,  # [N]
    N: gl.constexpr,
    K: gl.constexpr,
    BLOCKS: gl.constexpr,
    WARPS: gl.constexpr,
    PADDED: gl.constexpr,  # a power of two: at least the blocks of a warp
    AHEAD: gl.constexpr,  # blocks of a warp in flight
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    ASM: gl.constexpr,  # this and the next three: of `row_product`
    OPERANDS: gl.constexpr,
    LIFTED: gl.constexpr,
    SCALE: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    LANES: gl.constexpr = gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0])
    RESULT: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(4, LANES))  # [r, t, eight]
    EACH: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    strip = gl.program_id(0)
    words_ptr = words_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    if OVERLAP:
        control("griddepcontrol.launch_dependents;")
    ready = ()
    for step in gl.static_range(AHEAD):
        ready = ready + (load_block(words_ptr, strip, step * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005 (Triton knows no other way)
    kept = gl.allocate_shared_memory(
        gl.int32, [PADDED * WARPS, 8, 2, 2], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    )
    _keep_scales(kept, scales_ptr, strip, N, BLOCKS, PADDED, WARPS)
    if OVERLAP:
        control("griddepcontrol.wait;")
    row = gl.allocate_shared_memory(gl.int32, [PADDED * WARPS, 8, 2, 4], gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))
    _keep_row(row, x_ptr.to(gl.pointer_type(gl.int32), bitcast=True), K, PADDED, WARPS, LIFTED)
    acc = gl.zeros([WARPS, 8, 4, 2, 2], gl.float32, LANES)  # group 2 * t + the last axis of each row
    for step in gl.static_range(EACH):
        if step + AHEAD < EACH:
            ready = ready + (load_block(words_ptr, strip, (step + AHEAD) * WARPS, BLOCKS, WARPS, LANES),)  # noqa: RUF005
        first_half, second_half = ready[step]
        x = row.slice(step * WARPS, WARPS).permute([0, 1, 3, 2]).load(gl.SliceLayout(3, LANES))  # r is the group
        part = gl.inline_asm_elementwise(
            ASM, OPERANDS, [first_half, second_half, gl.expand_dims(x, 3)], dtype=gl.float32, is_pure=True, pack=4
        )
        acc += part * _load_scales(kept.slice(step * WARPS, WARPS), WARPS, SCALE, LANES)
    result = gl.expand_dims(gl.sum(gl.sum(gl.sum(acc, 4), 0), 1), 1) + gl.zeros([8, 4, 2], gl.float32, RESULT)
    n = strip_rows(strip, RESULT)
    result *= gl.load(scales_ptr + 2 * BLOCKS * N + n, mask=n < N, other=0).to(gl.float32, bitcast=True)
    store_strip(result, bias_ptr, residual_ptr, out_ptr, strip, N, BIAS, ADD, RESULT)


@lru_cache
def row_product(dtype: torch.dtype) -> dict[str, str]:
    """Return the assembly for x in bfloat16 or float16: of a block's product, its operands, of x, and of scales.

    Codes become numbers that lack 2 ** 126 or 2 ** 14. Sums of such bfloat16 numbers would be too small for float32, so
    x is multiplied by 2 ** 64. Scales have what is missing then. Their bytes lack 117 in the exponent, and 2 ** 10 is
    in the rows' factors.
    """
    half = dtype == torch.float16
    kind, missing, lifted = ("f16", 14, "") if half else ("bf16", 126 - 64, _times(0x5F80_5F80))
    lines = ["{", ".reg .b32 a<32>, b<2>, t, group;", ".reg .pred mine;"]
    lines += ["mov.u32 group, %laneid;", "shr.u32 group, group, 2;"]
    for word in range(8):
        lines += e2m1_numbers(half, f"${4 + word}", [f"a{8 * quarter + word}" for quarter in range(4)])
    for group in range(8):
        # The words of rows r and 8 + r, and those of the columns 8 further on.
        left = ", ".join(f"a{4 * group + word}" for word in (0, 2, 1, 3))
        before = "{$0, $1, $2, $3}" if group else "{0f00000000, 0f00000000, 0f00000000, 0f00000000}"
        lines.append(f"setp.eq.u32 mine, group, {group};")
        lines += [f"selp.b32 b{eight}, ${12 + eight}, 0, mine;" for eight in range(2)]
        lines.append(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$0, $1, $2, $3}}, {{{left}}}, "
            f"{{b0, b1}}, {before};"
        )
    scale = f"{{ prmt.b32 $0, $1, 0, $2; mad.lo.s32 $0, $0, 16, {117 + missing - 10 << 23}; }}"
    return {"ASM": "\n".join((*lines, "}")), "OPERANDS": OPERANDS, "LIFTED": lifted, "SCALE": scale}


def _times(factor: int) -> str:
    """Return assembly that multiplies a pair of bfloat16 numbers."""
    return (
        f"{{ .reg .b32 factor, zero; mov.b32 factor, {factor}; mov.b32 zero, 0x80008000; "
        "fma.rn.bf16x2 $0, $1, factor, zero; }"
    )

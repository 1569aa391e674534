"""A candidate for tiles of MXFP4 experts. The engine does not use it; `bench/packed_tiles.py` times it.

If it loses on a GPU, it is to be deleted. If it wins, it moves to `kernels/experts/packed`.

`streamed_tiles`: each warp multiplies its own strips of 16 rows of a matrix by a tile of 8 to 32 tokens. Words and
tokens go from memory into the registers that tensor cores read. So the loop has neither a barrier nor shared memory,
and the many warps of a processor hide each other's waiting. Scales multiply the sums of 32 columns, not the weights.
The tokens of a tile are gathered once, in the order of the registers.

Every tensor has one element for each thread, so that Triton chooses no layouts. Without assembly, the interpreter runs
the same kernel.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import activated, gate_up_biases, row_biases
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.int4.block import e2m1
from aengine.kernels.variants import keep_variants
from bench.packed_strips import strip_product

PRESCALED = 2.0**64  # the factor of the values between the products: tensor cores count in steps below 2 ** -126


@triton.jit
def _place(n, m, GROUPS: tl.constexpr):
    """Return where column n of token m is in a tile: [block, quarter, GROUPS, 8 tokens, t, half, eight, pair]."""
    place = n // 128 * (1024 * GROUPS) + n % 128 // 32 * (256 * GROUPS) + m // 8 * 256 + m % 8 * 32
    return place + n % 8 // 2 * 8 + n % 32 // 16 * 4 + n % 16 // 8 * 2 + n % 2


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _gather_kernel(
    x_ptr,  # [tokens, K]
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # [capacity, BLOCKS * 1024 * GROUPS], as `_place` says
    capacity,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if tile < tl.load(count_ptr):
        at = tl.arange(0, 1024)
        k, m = block * 128 + at % 128, at // 128
        for _ in tl.static_range(GROUPS):
            row = tl.load(tiles_ptr + capacity + tile) + m
            used = row < tl.load(tiles_ptr + 2 * capacity + tile)
            token = tl.load(order_ptr + row, mask=used, other=0) // TOP_K
            x = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=used & (k < K), other=0.0)
            tl.store(out_ptr + tile.to(tl.int64) * (BLOCKS * 1024 * GROUPS) + _place(k, m, GROUPS), x)
            m += 8


@triton.jit
def _load_words(pointer, PLAIN: tl.constexpr):
    """Load a strip's block: of each half of a quarter the words of rows r, r, 8 + r and 8 + r, as int32."""
    if PLAIN:
        words = ()
        for at in tl.static_range(8):
            words = words + (tl.load(pointer + at // 4 * 128 + at % 4),)  # noqa: RUF005 (Triton knows no other way)
    else:
        words = tl.inline_asm_elementwise(
            "ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$8];"
            "ld.global.nc.L1::no_allocate.v4.b32 {$4, $5, $6, $7}, [$8 + 512];",
            "=r,=r,=r,=r,=r,=r,=r,=r,l", [pointer.to(tl.int64)],
            dtype=(tl.int32,) * 8, is_pure=False, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def _numbers(word, dtype: tl.constexpr):
    """Return the two numbers in each int32."""
    low = (word & 65535).to(tl.uint16).to(dtype, bitcast=True)
    return low, (word >> 16 & 65535).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """Stack eight tensors [n], [n, 2, 2, 2]: the last axis has a and b."""
    low, high = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))  # [n, pair, next]
    return tl.permute(tl.join(low, high), [0, 3, 2, 1])


@triton.jit
def _plain_quarter(words, x, QUARTER: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr):
    """Multiply a quarter as the tensor cores do. Return the four sums of each thread."""
    sides = ()
    for eight in tl.static_range(2):  # of rows
        first, second = words[2 * eight], words[2 * eight + 1]
        third, fourth = words[4 + 2 * eight], words[4 + 2 * eight + 1]
        side = _joined(
            e2m1(first & 65535, QUARTER), e2m1(first >> 16 & 65535, QUARTER),
            e2m1(second & 65535, QUARTER), e2m1(second >> 16 & 65535, QUARTER),
            e2m1(third & 65535, QUARTER), e2m1(third >> 16 & 65535, QUARTER),
            e2m1(fourth & 65535, QUARTER), e2m1(fourth >> 16 & 65535, QUARTER),
        )  # fmt: skip
        sides = sides + (tl.reshape(side, [WARPS, 8, 32]),)  # noqa: RUF005 (columns are t, half, eight, pair)
    left = tl.reshape(tl.permute(tl.join(sides[0], sides[1]), [0, 3, 1, 2]), [WARPS, 16, 32])
    x0, x1 = _numbers(x[0], dtype)
    x2, x3 = _numbers(x[1], dtype)
    x4, x5 = _numbers(x[2], dtype)
    x6, x7 = _numbers(x[3], dtype)
    right = tl.reshape(_joined(x0, x1, x2, x3, x4, x5, x6, x7), [WARPS, 8, 32]).to(tl.float32)
    product = tl.dot(left, tl.permute(right, [0, 2, 1]), input_precision="ieee")
    product = tl.permute(tl.reshape(product, [WARPS, 2, 8, 4, 2]), [0, 2, 3, 1, 4])
    even, odd = tl.split(tl.reshape(product, [WARPS * 32, 2, 2]))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@triton.jit
def _plain_strip(
    acc, words, scales, x_ptr, GROUPS: tl.constexpr, WARPS: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Add a strip's block without assembly. x_ptr: each thread's words of the tokens' block."""
    for quarter in tl.static_range(4):
        upper, lower = (scales[0] >> 8 * quarter & 255) << 23, (scales[1] >> 8 * quarter & 255) << 23
        upper, lower = upper.to(tl.float32, bitcast=True), lower.to(tl.float32, bitcast=True)
        for group in tl.static_range(GROUPS):
            place = x_ptr + (quarter * GROUPS + group) * 128
            x = tl.load(place), tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
            p0, p1, p2, p3 = _plain_quarter(words, x, quarter, WARPS, dtype)
            a0, a1, a2, a3 = acc[4 * group : 4 * group + 4]
            new = (a0 + p0 * upper, a1 + p1 * upper, a2 + p2 * lower, a3 + p3 * lower)
            acc = acc[: 4 * group] + new + acc[4 * group + 4 :]
    return acc


@triton.jit
def _add(
    acc, words, scales, x_ptr, inside, STRIPS: tl.constexpr, GROUPS: tl.constexpr, WARPS: tl.constexpr,
    EVEN: tl.constexpr, PLAIN: tl.constexpr, ASM: tl.constexpr, OPERANDS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Add the product of a block of all strips to their sums. For each eight of tokens a strip has four sums: of rows
    r, r, 8 + r and 8 + r. EVEN: the block is `inside` for all warps.
    """
    if PLAIN:
        new = ()
        for at in tl.static_range(STRIPS):
            new = new + _plain_strip(
                acc[at * 4 * GROUPS : (at + 1) * 4 * GROUPS], words[8 * at : 8 * at + 8], scales[2 * at : 2 * at + 2],
                x_ptr, GROUPS, WARPS, dtype,
            )  # fmt: skip
    else:
        new = tl.inline_asm_elementwise(
            ASM, OPERANDS, words + scales + (x_ptr.to(tl.int64),) + acc, dtype=(tl.float32,) * (4 * GROUPS * STRIPS),
            is_pure=False, pack=1,
        )  # fmt: skip
    if EVEN:
        acc = new
    else:
        kept = ()
        for at in tl.static_range(4 * GROUPS * STRIPS):
            kept = kept + (tl.where(inside, new[at], acc[at]),)  # noqa: RUF005
        acc = kept
    return acc


@triton.jit
def _load(words_ptr, scales_ptr, word, scale, block, all_rows, STRIPS: tl.constexpr, PLAIN: tl.constexpr):
    """Load a block of each strip. word, scale: where each strip begins."""
    words, scales = (), ()
    for strip in tl.static_range(STRIPS):
        words = words + _load_words(words_ptr + (word[strip] + block * 256), PLAIN)
        row = scales_ptr + (scale[strip] + block * all_rows)
        scales = scales + (tl.load(row), tl.load(row + 8))  # noqa: RUF005
    return words, scales


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _streamed_kernel(
    x_ptr,  # [capacity, BLOCKS * 1024 * GROUPS], as `_place` says
    words_ptr,  # [E * parts * STRIPS, BLOCKS, 512] int16; two parts if GATED: gate and up
    scales_ptr,  # [BLOCKS, all_rows] int32
    biases_ptr,  # [E, 2 * N or N], BIASES only
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # GATED: like x_ptr, with N columns; otherwise [pairs, N]
    capacity,
    all_rows,
    N: tl.constexpr,
    GROUPS: tl.constexpr,  # eights of tokens of a tile
    S: tl.constexpr,  # strips of a warp, of each part
    ROW_WARPS: tl.constexpr,  # warps with different strips
    COLUMN_WARPS: tl.constexpr,  # warps with different blocks of the same strips
    GATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    FACTOR: tl.constexpr,  # of what is stored
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    PLAIN: tl.constexpr,
    ASM: tl.constexpr,  # `strip_product`
    OPERANDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if GATED else 1
    WARPS: tl.constexpr = ROW_WARPS * COLUMN_WARPS
    MINE: tl.constexpr = PARTS * S
    TURNS: tl.constexpr = (BLOCKS + COLUMN_WARPS - 1) // COLUMN_WARPS
    columns: tl.constexpr = (STRIPS + ROW_WARPS * S - 1) // (ROW_WARPS * S)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    # Both are requested at once. After the last tile the expert is undefined and not used.
    count, expert = tl.load(count_ptr), tl.load(tiles_ptr + tile)
    if tile < count:
        thread = tl.arange(0, WARPS * 32)
        warp, lane = thread // 32, thread % 32
        words = words_ptr.to(tl.pointer_type(tl.int32)) + expert.to(tl.int64) * (PARTS * STRIPS * BLOCKS * 256)
        scales = scales_ptr + expert * (PARTS * STRIPS * 16)
        x = x_ptr.to(tl.pointer_type(tl.int32)) + tile.to(tl.int64) * (BLOCKS * 512 * GROUPS) + lane * 4
        word, scale, acc = (), (), ()
        for at in tl.static_range(MINE):
            # Strips after the end read the last one and are not stored.
            strip = tl.minimum((column * ROW_WARPS + warp // COLUMN_WARPS) * S + at % S, STRIPS - 1)
            strip += at // S * STRIPS
            word = word + (strip * (BLOCKS * 256) + lane * 4,)  # noqa: RUF005
            scale = scale + (strip * 16 + lane // 4,)  # noqa: RUF005
        for _ in tl.static_range(MINE * 4 * GROUPS):
            acc = acc + (tl.zeros([WARPS * 32], tl.float32),)  # noqa: RUF005
        block = warp % COLUMN_WARPS
        ready, scaled = _load(words, scales, word, scale, block, all_rows, MINE, PLAIN)
        for _ in tl.range(0, TURNS - 1, num_stages=1):
            acc = _add(
                acc, ready, scaled, x + block * (512 * GROUPS), True, MINE, GROUPS, WARPS, True, PLAIN, ASM, OPERANDS,
                dtype,
            )  # fmt: skip
            block += COLUMN_WARPS
            # A block after the end is not added.
            inside = tl.minimum(block, BLOCKS - 1)
            ready, scaled = _load(words, scales, word, scale, inside, all_rows, MINE, PLAIN)
        acc = _add(
            acc, ready, scaled, x + tl.minimum(block, BLOCKS - 1) * (512 * GROUPS), block < BLOCKS, MINE, GROUPS, WARPS,
            BLOCKS % COLUMN_WARPS == 0, PLAIN, ASM, OPERANDS, dtype,
        )  # fmt: skip
        begin = tl.load(tiles_ptr + capacity + tile)
        height = tl.load(tiles_ptr + 2 * capacity + tile) - begin
        # After the sum over warps, each 32 elements are the lanes of one that has different strips.
        rest = tl.arange(0, ROW_WARPS * 32)
        lane = rest % 32
        NEXT: tl.constexpr = (N + 127) // 128  # blocks of the next product
        inner = out_ptr + tile.to(tl.int64) * (NEXT * 1024 * GROUPS)
        for at in tl.static_range(S * 4 * GROUPS):
            m = at // 4 % GROUPS * 8 + lane % 4 * 2 + at % 2
            n = ((column * ROW_WARPS + rest // 32) * S + at // (4 * GROUPS)) * 16 + lane // 4 + at % 4 // 2 * 8
            inside = (m < height) & (n < N)
            result = _over_warps(acc[at], ROW_WARPS, COLUMN_WARPS)
            if GATED:
                up = _over_warps(acc[S * 4 * GROUPS + at], ROW_WARPS, COLUMN_WARPS)
                if BIASES:
                    of_gate, of_up = gate_up_biases(biases_ptr, expert, n, N)
                    result, up = result + of_gate, up + of_up
                result = activated(result, up, ALPHA, LIMIT, GELU) * FACTOR
                tl.store(inner + _place(n, m, GROUPS), result.to(dtype), mask=inside)
            else:
                result *= FACTOR
                if BIASES:
                    result += row_biases(biases_ptr, expert, n, N)
                pair = tl.load(order_ptr + begin + m, mask=inside, other=0)
                tl.store(out_ptr + pair.to(tl.int64) * N + n, result.to(dtype), mask=inside)
        # Codes after the end are zeros, and what they multiply must be finite.
        PADDED: tl.constexpr = NEXT * 128 - N if GATED else 0
        for at in tl.static_range((PADDED * 8 * GROUPS + WARPS * 32 - 1) // (WARPS * 32)):
            place = at * (WARPS * 32) + thread
            n = N + place // (8 * GROUPS)
            zero = tl.zeros([WARPS * 32], tl.float32).to(dtype)
            end = tl.where(column == columns - 1, NEXT * 128, 0)
            tl.store(inner + _place(n, place % (8 * GROUPS), GROUPS), zero, mask=n < end)


@triton.jit
def _over_warps(one, ROW_WARPS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    if COLUMN_WARPS > 1:
        one = tl.reshape(tl.sum(tl.reshape(one, [ROW_WARPS, COLUMN_WARPS, 32]), axis=1), [ROW_WARPS * 32])
    return one


@dataclass(frozen=True, slots=True)
class StreamedCut:
    """How one of the two products is divided, as the kernel's constants say."""

    strips: int  # of each part
    row_warps: int
    column_warps: int = 1


@dataclass(frozen=True, slots=True)
class StreamedConfig:
    """groups: eights of tokens of a tile."""

    groups: int
    gate_up: StreamedCut
    down: StreamedCut

    @property
    def height(self) -> int:
        return 8 * self.groups


def streamed_tiles(
    h: Tensor, plan: Plan, top_k: int, gate_up: PackedMatrices, down: PackedMatrices, config: StreamedConfig,
    rule: ExpertRule,
) -> Tensor:  # fmt: skip
    """Return what `PackedPass.down` returns, for MXFP4 and rows in bfloat16; without a GPU in float16.

    The plan's tiles have `config.height` tokens. Raises: ValueError if the matrices do not fit.
    """
    if not (gate_up.e2m1 and gate_up.group == down.group == 32 and gate_up.bare and down.bare):
        raise ValueError("only MXFP4 with scales up to 2 fits")
    launch, groups, plain = launch_for(h.device), config.groups, h.device.type == "cpu"
    blocks = gate_up.words.shape[1]
    sorted_x = h.new_empty(plan.capacity, blocks * 1024 * groups)
    _gather_kernel[(plan.capacity * blocks,)](
        h, plan.order, plan.tiles, plan.count, sorted_x, plan.capacity, K=gate_up.columns, TOP_K=top_k, BLOCKS=blocks,
        GROUPS=groups, OVERLAP=launch.overlap, num_warps=4, launch_pdl=launch.overlap,
    )  # fmt: skip
    inner = h.new_empty(plan.capacity, down.words.shape[1] * 1024 * groups)
    out = h.new_empty(plan.order.numel(), down.rows)
    for x, w, cut, result, gated in ((sorted_x, gate_up, config.gate_up, inner, True),
                                     (inner, down, config.down, out, False)):  # fmt: skip
        strips = w.constants["STRIPS"]
        assembly, operands = ("", "") if plain else strip_product(groups, cut.strips * (2 if gated else 1))
        factor = 1.0 if plain else PRESCALED if gated else 1 / PRESCALED
        _streamed_kernel[(plan.capacity * -(-strips // (cut.strips * cut.row_warps)),)](
            x, w.words, w.scales, rule.pointers(h)[0 if gated else 1], plan.order, plan.tiles, plan.count, result,
            plan.capacity, w.scales.shape[1], N=w.rows, GROUPS=groups, S=cut.strips, ROW_WARPS=cut.row_warps,
            COLUMN_WARPS=cut.column_warps, GATED=gated, BLOCKS=w.words.shape[1], STRIPS=strips,
            FACTOR=factor, **rule.gate_up, PLAIN=plain, ASM=assembly, OPERANDS=operands,
            OVERLAP=launch.overlap, num_warps=cut.row_warps * cut.column_warps, launch_pdl=launch.overlap,
        )  # fmt: skip
    return out

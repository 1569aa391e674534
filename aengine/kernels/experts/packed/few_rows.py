"""Experts of MXFP4 for a few rows each: a warp multiplies two strips of 16 rows of a matrix by a tile of 8 tokens.

Plan and grid are those of `packed.rows`, in tiles of 8. Words and tokens go from memory into the registers that tensor
cores read. So the loop has neither a barrier nor shared memory, and the many warps of a processor hide each other's
waiting. Scales multiply the sums of 32 columns, not the weights. The tokens of a tile are gathered once, in the order
of the registers, and the first product stores its results in that order.

Every tensor has one element for each thread, so that Triton chooses no layouts. In comments on a thread, its row r is
lane // 4.
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
from aengine.kernels.experts.packed.strips import OPERANDS, two_strips
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.int4.block import e2m1
from aengine.kernels.variants import keep_variants

HEIGHT = 8  # rows of a tile
WARPS = tl.constexpr(4)  # of a program
# Codes lack 2 ** 126, and tensor cores add in steps below 2 ** -126. So what they multiply has this factor.
FACTOR = tl.constexpr(2.0**64)
PRODUCT, PRODUCT_OPERANDS = tl.constexpr(two_strips()), tl.constexpr(OPERANDS)


@triton.jit
def _place(n, m):
    """Return where column n of token m is in a tile: [block, quarter, 8 tokens, t, half, eight, pair]."""
    return n // 32 * 256 + m * 32 + n % 8 // 2 * 8 + n % 32 // 16 * 4 + n % 16 // 8 * 2 + n % 2


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _gather_kernel(
    x_ptr,  # [rows, K]
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # [capacity, BLOCKS * 1024], as `_place` says, times FACTOR
    capacity,
    K: tl.constexpr,
    PAIRS: tl.constexpr,  # of a row
    BLOCKS: tl.constexpr,
    PLAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if tile < tl.load(count_ptr):
        at = tl.arange(0, 1024)
        k, m = block * 128 + at % 128, at // 128
        row = tl.load(tiles_ptr + capacity + tile) + m
        used = row < tl.load(tiles_ptr + 2 * capacity + tile)
        row = tl.load(order_ptr + row, mask=used, other=0) // PAIRS
        x = tl.load(x_ptr + row.to(tl.int64) * K + k, mask=used & (k < K), other=0.0)
        if not PLAIN:
            x = (x.to(tl.float32) * FACTOR).to(x.dtype)
        tl.store(out_ptr + tile.to(tl.int64) * (BLOCKS * 1024) + _place(k, m), x)


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
def _load(words_ptr, scales_ptr, word, scale, block, all_rows, PLAIN: tl.constexpr):
    """Load a block of two strips, eight words of each, and the scales of rows r and 8 + r of each.

    word, scale: where each strip begins.
    """
    words, scales = (), ()
    for strip in tl.static_range(2):
        words = words + _load_words(words_ptr + (word[strip] + block * 256), PLAIN)
        row = scales_ptr + (scale[strip] + block * all_rows)
        scales = scales + (tl.load(row), tl.load(row + 8))  # noqa: RUF005
    return words, scales


@triton.jit
def _numbers(word, dtype: tl.constexpr):
    """Return the two numbers in each int32."""
    low = (word & 65535).to(tl.uint16).to(dtype, bitcast=True)
    return low, (word >> 16 & 65535).to(tl.uint16).to(dtype, bitcast=True)


@triton.jit
def _joined(a, b, c, d, e, f, g, h):
    """Stack eight tensors [threads] to [warps, 8, 32], whose columns are t, half, eight, pair: the last has a and b."""
    low, high = tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h))  # [threads, pair, next]
    return tl.reshape(tl.permute(tl.join(low, high), [0, 3, 2, 1]), [WARPS, 8, 32])


@triton.jit
def _plain_rows(a, b, c, d, QUARTER: tl.constexpr):
    """Return a quarter of eight rows, of which each thread has four words of two codes."""
    return _joined(
        e2m1(a & 65535, QUARTER), e2m1(a >> 16 & 65535, QUARTER), e2m1(b & 65535, QUARTER),
        e2m1(b >> 16 & 65535, QUARTER), e2m1(c & 65535, QUARTER), e2m1(c >> 16 & 65535, QUARTER),
        e2m1(d & 65535, QUARTER), e2m1(d >> 16 & 65535, QUARTER),
    )  # fmt: skip


@triton.jit
def _plain_quarter(words, x_ptr, QUARTER: tl.constexpr, dtype: tl.constexpr):
    """Multiply a quarter as the tensor cores do. Return the four sums of each thread."""
    upper = _plain_rows(words[0], words[1], words[4], words[5], QUARTER)
    lower = _plain_rows(words[2], words[3], words[6], words[7], QUARTER)
    left = tl.reshape(tl.permute(tl.join(upper, lower), [0, 3, 1, 2]), [WARPS, 16, 32])
    x0, x1 = _numbers(tl.load(x_ptr), dtype)
    x2, x3 = _numbers(tl.load(x_ptr + 1), dtype)
    x4, x5 = _numbers(tl.load(x_ptr + 2), dtype)
    x6, x7 = _numbers(tl.load(x_ptr + 3), dtype)
    right = _joined(x0, x1, x2, x3, x4, x5, x6, x7).to(tl.float32)
    product = tl.dot(left, tl.permute(right, [0, 2, 1]), input_precision="ieee")
    product = tl.permute(tl.reshape(product, [WARPS, 2, 8, 4, 2]), [0, 2, 3, 1, 4])
    even, odd = tl.split(tl.reshape(product, [WARPS * 32, 2, 2]))
    p0, p2 = tl.split(even)
    p1, p3 = tl.split(odd)
    return p0, p1, p2, p3


@triton.jit
def _plain_strip(acc, words, scales, x_ptr, dtype: tl.constexpr):
    """Add a strip's block without assembly."""
    a0, a1, a2, a3 = acc
    for quarter in tl.static_range(4):
        upper, lower = (scales[0] >> 8 * quarter & 255) << 23, (scales[1] >> 8 * quarter & 255) << 23
        upper, lower = upper.to(tl.float32, bitcast=True), lower.to(tl.float32, bitcast=True)
        p0, p1, p2, p3 = _plain_quarter(words, x_ptr + quarter * 128, quarter, dtype)
        a0, a1, a2, a3 = a0 + p0 * upper, a1 + p1 * upper, a2 + p2 * lower, a3 + p3 * lower
    return a0, a1, a2, a3


@triton.jit
def _add(acc, words, scales, x_ptr, PLAIN: tl.constexpr, dtype: tl.constexpr):
    """Add the product of a block of two strips to their sums, which are of rows r, r, 8 + r and 8 + r of each."""
    if PLAIN:
        first = _plain_strip(acc[:4], words[:8], scales[:2], x_ptr, dtype)
        acc = first + _plain_strip(acc[4:], words[8:], scales[2:], x_ptr, dtype)
    else:
        acc = tl.inline_asm_elementwise(
            PRODUCT, PRODUCT_OPERANDS, words + scales + (x_ptr.to(tl.int64),) + acc, dtype=(tl.float32,) * 8,
            is_pure=False, pack=1,
        )  # fmt: skip
    return acc


@triton.jit
def _over_warps(before, last, block, BLOCKS: tl.constexpr, COLUMN_WARPS: tl.constexpr):
    """Add up what warps of the same strips have: [WARPS * 32] -> [WARPS / COLUMN_WARPS * 32].

    block: of the last product. If there is no such block, the sum before is taken.
    """
    one = last if BLOCKS % COLUMN_WARPS == 0 else tl.where(block < BLOCKS, last, before)
    if COLUMN_WARPS > 1:
        ROWS: tl.constexpr = WARPS // COLUMN_WARPS
        one = tl.reshape(tl.sum(tl.reshape(one, [ROWS, COLUMN_WARPS, 32]), axis=1), [ROWS * 32])
    return one


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _packed_few_kernel(
    x_ptr,  # [capacity, BLOCKS * 1024], as `_gather_kernel` stores it
    words_ptr,  # [E * parts * STRIPS, BLOCKS, 512] int16; two parts if GATED: gate and up
    scales_ptr,  # [BLOCKS, all_rows] int32
    biases_ptr,  # [E, 2 * N or N], BIASES only
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # GATED: like x_ptr, with N columns; GATED and UNFUSED: [pairs, 2 * N]; otherwise [pairs, N]
    capacity,
    all_rows,  # no constant, because gate and up would take 72 registers instead of 64
    N: tl.constexpr,
    COLUMN_WARPS: tl.constexpr,  # warps of the same strips, with different blocks
    GATED: tl.constexpr,  # the first product: a strip of gate and the same one of up; otherwise two neighbours of down
    UNFUSED: tl.constexpr,  # GATED only: not activated
    BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    PLAIN: tl.constexpr,  # without assembly
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if GATED else 1
    FUSED: tl.constexpr = GATED and not UNFUSED
    S: tl.constexpr = 2 // PARTS  # strips of a warp, of each part
    ROW_WARPS: tl.constexpr = WARPS // COLUMN_WARPS
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
        x = x_ptr.to(tl.pointer_type(tl.int32)) + tile.to(tl.int64) * (BLOCKS * 512) + lane * 4
        # Strips after the end read the last one and are not stored.
        first = (column * ROW_WARPS + warp // COLUMN_WARPS) * S
        second = tl.minimum(first + 1, STRIPS - 1)
        first = tl.minimum(first, STRIPS - 1)
        if GATED:
            second = first + STRIPS
        word = first * (BLOCKS * 256) + lane * 4, second * (BLOCKS * 256) + lane * 4
        scale = first * 16 + lane // 4, second * 16 + lane // 4
        zero = tl.zeros([WARPS * 32], tl.float32)
        acc = (zero, zero, zero, zero, zero, zero, zero, zero)
        block = warp % COLUMN_WARPS
        # Blocks after the end are the last one, and are not added.
        inside = tl.minimum(block, BLOCKS - 1)
        ready, scaled = _load(words, scales, word, scale, inside, all_rows, PLAIN)
        for _ in tl.range(0, TURNS - 1, num_stages=1):
            acc = _add(acc, ready, scaled, x + block * 512, PLAIN, dtype)
            block += COLUMN_WARPS
            inside = tl.minimum(block, BLOCKS - 1)
            ready, scaled = _load(words, scales, word, scale, inside, all_rows, PLAIN)
        last = _add(acc, ready, scaled, x + inside * 512, PLAIN, dtype)
        begin = tl.load(tiles_ptr + capacity + tile)
        height = tl.load(tiles_ptr + 2 * capacity + tile) - begin
        # After the sum over warps, each 32 elements are the lanes of one that has different strips.
        rest = tl.arange(0, ROW_WARPS * 32)
        lane = rest % 32
        SCALE: tl.constexpr = 1.0 if PLAIN else FACTOR
        NEXT: tl.constexpr = (N + 127) // 128  # blocks of the next product
        inner = out_ptr + tile.to(tl.int64) * (NEXT * 1024)
        for at in tl.static_range(4 * S):
            m = lane % 4 * 2 + at % 2
            n = ((column * ROW_WARPS + rest // 32) * S + at // 4) * 16 + lane // 4 + at % 4 // 2 * 8
            inside = (m < height) & (n < N)
            result = _over_warps(acc[at], last[at], block, BLOCKS, COLUMN_WARPS) * (1.0 / SCALE)
            up = result
            if GATED:
                up = _over_warps(acc[4 + at], last[4 + at], block, BLOCKS, COLUMN_WARPS) * (1.0 / SCALE)
            if BIASES and GATED:
                of_gate, of_up = gate_up_biases(biases_ptr, expert, n, N)
                result, up = result + of_gate, up + of_up
            elif BIASES:
                result += row_biases(biases_ptr, expert, n, N)
            if FUSED:
                result = activated(result, up, ALPHA, LIMIT, GELU) * SCALE
                tl.store(inner + _place(n, m), result.to(dtype), mask=inside)
            else:
                pair = tl.load(order_ptr + begin + m, mask=inside, other=0)
                out = out_ptr + pair.to(tl.int64) * (PARTS * N) + n
                tl.store(out, result.to(dtype), mask=inside)
                if UNFUSED:
                    tl.store(out + N, up.to(dtype), mask=inside)
        # Codes after the end are zeros, and what they multiply must be finite.
        PADDED: tl.constexpr = NEXT * 128 - N if FUSED else 0
        for at in tl.static_range((PADDED * 8 + WARPS * 32 - 1) // (WARPS * 32)):
            place = at * (WARPS * 32) + thread
            n = N + place // 8
            end = tl.where(column == columns - 1, NEXT * 128, 0)
            tl.store(inner + _place(n, place % 8), zero.to(dtype), mask=n < end)


@dataclass(frozen=True, slots=True)
class PackedFewConfig:
    """How a tile of few rows is divided among programs and warps.

    column_warps: how many of a program's four warps have the same strips, each with other blocks of columns.
    """

    column_warps: int

    @property
    def height(self) -> int:
        return HEIGHT


@dataclass(frozen=True, slots=True, eq=False)
class PackedFewPass:
    """`ExpertPass` of MXFP4 in bfloat16, of gated experts and matrices that are `bare`."""

    h: Tensor
    ids: Tensor
    plan: Plan
    gate_up_matrices: PackedMatrices
    down_matrices: PackedMatrices
    config: PackedFewConfig
    rule: ExpertRule

    @property
    def sorted(self) -> bool:
        return False

    def activated(self) -> Tensor:
        """Return the input of down in tiles: [capacity, blocks * 1024], as `_place` says, times FACTOR."""
        w, blocks = self.gate_up_matrices, self.down_matrices.words.shape[1]
        out = self.h.new_empty(self.plan.capacity, blocks * 1024)
        return self._launch(self._gathered(self.h, w, self.ids.shape[1]), w, out, gated=True)

    def gate_up(self) -> Tensor:
        w = self.gate_up_matrices
        out = self.h.new_empty(self.ids.numel(), 2 * w.rows)
        return self._launch(self._gathered(self.h, w, self.ids.shape[1]), w, out, gated=True, unfused=True)

    def down(self, inner: Tensor) -> Tensor:
        w = self.down_matrices
        if inner.shape[1] == w.columns:  # it is not from `activated`
            inner = self._gathered(inner, w, 1)
        return self._launch(inner, w, inner.new_empty(self.ids.numel(), w.rows))

    def _gathered(self, x: Tensor, w: PackedMatrices, pairs: int) -> Tensor:
        """x [pairs / pairs of a row, columns] -> [capacity, blocks * 1024]."""
        launch, plan, blocks = launch_for(x.device), self.plan, w.words.shape[1]
        out = x.new_empty(plan.capacity, blocks * 1024)
        _gather_kernel[(plan.capacity * blocks,)](
            x, plan.order, plan.tiles, plan.count, out, plan.capacity, K=w.columns, PAIRS=pairs, BLOCKS=blocks,
            PLAIN=not launch.warp_groups, OVERLAP=launch.overlap, num_warps=4, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

    def _launch(
        self, x: Tensor, w: PackedMatrices, out: Tensor, *, gated: bool = False, unfused: bool = False
    ) -> Tensor:
        launch, plan, rule, strips = launch_for(x.device), self.plan, self.rule, w.constants["STRIPS"]
        strips_of_program = WARPS.value // self.config.column_warps * (1 if gated else 2)
        _packed_few_kernel[(plan.capacity * -(-strips // strips_of_program),)](
            x, w.words, w.scales, rule.pointers(x)[0 if gated else 1], plan.order, plan.tiles, plan.count, out,
            plan.capacity, w.scales.shape[1], N=w.rows, COLUMN_WARPS=self.config.column_warps, GATED=gated,
            UNFUSED=unfused, BLOCKS=w.words.shape[1], STRIPS=strips, **rule.gate_up, PLAIN=not launch.warp_groups,
            OVERLAP=launch.overlap, num_warps=WARPS.value, launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

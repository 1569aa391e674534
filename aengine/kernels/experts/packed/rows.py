"""Experts of 4-bit codes for some rows each: a tile of rows reads its expert's codes once and unpacks them.

Plan, tiles and grid are those of `experts.few_rows`. A block of 128 columns is four products, or one. A single product
runs asynchronously while the next block is unpacked: see `int4.many`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import store_pairs
from aengine.kernels.experts.packed.matrices import PackedMatrices
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.int4.block import (
    add_block,
    apply_factors,
    load_quarters,
    load_scales,
    load_strips,
    one_after_another,
    unpack,
    unpacking,
)
from aengine.kernels.variants import keep_variants

LEAST = tl.constexpr(64)  # least rows of a quarter of a tile: with fewer, products take as long


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _packed_rows_kernel(
    x_ptr,  # FIRST: [tokens, K], otherwise [pairs, K]
    words_ptr,  # [E * parts * STRIPS, BLOCKS, 512] int16; two parts if GATED: gate and up
    scales_ptr,  # [groups, ALL_ROWS] int32
    biases_ptr,  # [E, 2 * N or N], BIASES only
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # [pairs, N]; GATED and UNFUSED: [pairs, 2 * N], gate, then up
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    M: tl.constexpr,  # the height of a tile
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,  # the first product, which is activated
    GATED: tl.constexpr,  # FIRST only: of gate and up
    UNFUSED: tl.constexpr,  # FIRST only: not activated
    AHEAD: tl.constexpr,  # a block is one product
    BLOCKS: tl.constexpr,
    STRIPS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    E2M1: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    ASM: tl.constexpr,  # how words are unpacked; empty: without assembly
    BASE: tl.constexpr,
    LIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    if tile < tl.load(count_ptr):
        rows = tl.load(tiles_ptr + 2 * capacity + tile) - tl.load(tiles_ptr + capacity + tile)
        if M < 4 * LEAST:
            _tile(
                x_ptr, words_ptr, scales_ptr, biases_ptr, order_ptr, tiles_ptr, out_ptr, capacity, tile, column,
                N, K, TOP_K, M, BLOCK_N, STAGES, FIRST, GATED, UNFUSED, AHEAD, BLOCKS, STRIPS, ALL_ROWS, GROUP,
                E2M1, ALPHA, LIMIT, GELU, BIASES, ASM, BASE, LIFT, PRECISION,
            )  # fmt: skip
        elif rows <= M // 4:  # the last tile of an expert
            _tile(
                x_ptr, words_ptr, scales_ptr, biases_ptr, order_ptr, tiles_ptr, out_ptr, capacity, tile, column,
                N, K, TOP_K, M // 4, BLOCK_N, STAGES, FIRST, GATED, UNFUSED, AHEAD, BLOCKS, STRIPS, ALL_ROWS, GROUP,
                E2M1, ALPHA, LIMIT, GELU, BIASES, ASM, BASE, LIFT, PRECISION,
            )  # fmt: skip
        else:
            _tile(
                x_ptr, words_ptr, scales_ptr, biases_ptr, order_ptr, tiles_ptr, out_ptr, capacity, tile, column,
                N, K, TOP_K, M, BLOCK_N, STAGES, FIRST, GATED, UNFUSED, AHEAD, BLOCKS, STRIPS, ALL_ROWS, GROUP,
                E2M1, ALPHA, LIMIT, GELU, BIASES, ASM, BASE, LIFT, PRECISION,
            )  # fmt: skip


@triton.jit
def _tile(
    x_ptr, words_ptr, scales_ptr, biases_ptr, order_ptr, tiles_ptr, out_ptr, capacity, tile, column,
    N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, UNFUSED: tl.constexpr, AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr, STRIPS: tl.constexpr, ALL_ROWS: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr, BIASES: tl.constexpr, ASM: tl.constexpr,
    BASE: tl.constexpr, LIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply a tile, which has at most M rows, by a block of columns of its expert."""
    PARTS: tl.constexpr = 2 if GATED else 1
    ROWS: tl.constexpr = PARTS * BLOCK_N
    expert = tl.load(tiles_ptr + tile)
    row = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, M)
    used = row < tl.load(tiles_ptr + 2 * capacity + tile)
    pair = tl.load(order_ptr + row, mask=used, other=0)
    # Rows after the end read the last ones and are not stored.
    index = tl.arange(0, ROWS // 16)
    strip = tl.minimum(column * (BLOCK_N // 16) + index % (BLOCK_N // 16), STRIPS - 1)
    strip += (expert * PARTS + index // (BLOCK_N // 16)) * STRIPS
    index = tl.arange(0, ROWS)
    of_part = tl.minimum(column * BLOCK_N + index % BLOCK_N, STRIPS * 16 - 1)
    scale_row = (expert * PARTS + index // BLOCK_N) * (STRIPS * 16) + of_part
    x_row = pair // TOP_K if FIRST else pair
    x_columns = x_ptr + x_row.to(tl.int64)[None, :] * K
    k = tl.arange(0, 128)[:, None]
    acc = tl.zeros([ROWS, M], tl.float32)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        words = load_strips(words_ptr, strip, block, BLOCKS, ROWS)
        scales = load_scales(scales_ptr, block, scale_row, E2M1, GROUP, ALL_ROWS)
        if AHEAD:
            inside = used[None, :] & (block * 128 + k < K) if K % 128 else used[None, :]
            x = tl.load(x_columns + k + block * 128, mask=inside, other=0.0)
            w0, w1, w2, w3 = unpack(words, scales, x, E2M1, True, GROUP, ASM, BASE, LIFT)
            acc = tl.dot(one_after_another(w0, w1, w2, w3, ROWS), x, acc, input_precision=PRECISION)
        else:
            x0, x1, x2, x3 = load_quarters(x_columns, block, used[None, :], K)
            acc = add_block(acc, words, scales, x0, x1, x2, x3, E2M1, True, GROUP, ASM, BASE, LIFT, PRECISION)
    acc = apply_factors(acc, scales_ptr, scale_row, GROUP, BLOCKS, ALL_ROWS)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    store_pairs(
        acc, out_ptr, biases_ptr, expert, pair, used, n, N, True, FIRST, GATED, UNFUSED, ALPHA, LIMIT, GELU, BIASES
    )


@dataclass(frozen=True, slots=True)
class PackedCut:
    """How one of the two products is divided.

    block_n: columns of the result, at least 16; gate and up have twice the weight rows. ahead: a block is one product.
    """

    block_n: int
    stages: int
    warps: int
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How tiles of rows are divided among programs. height: rows of a tile."""

    height: int
    gate_up: PackedCut
    down: PackedCut

    def shared_memory(self, element_size: int, weight_size: int) -> int:
        """Return an upper bound in bytes: words, scales and x in flight, or the sums as they are transposed."""
        each = (
            (cut.stages * (parts * cut.block_n * (64 + 16) + self.height * 128 * element_size), parts * cut.block_n)
            for cut, parts in ((self.gate_up, 2), (self.down, 1))
        )
        return max(max(copies, 4 * (self.height + 4) * rows) for copies, rows in each)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPass:
    """`ExpertPass` of 4-bit codes. Rows of x are read in place, and results are stored in the order of the pairs."""

    h: Tensor
    ids: Tensor
    plan: Plan
    gate_up_matrices: PackedMatrices
    down_matrices: PackedMatrices
    config: PackedConfig
    rule: ExpertRule

    @property
    def sorted(self) -> bool:
        return False

    def activated(self) -> Tensor:
        return self._launch(self.h, self.gate_up_matrices, first=True)

    def gate_up(self) -> Tensor:
        return self._launch(self.h, self.gate_up_matrices, first=True, unfused=True)

    def down(self, inner: Tensor) -> Tensor:
        return self._launch(inner, self.down_matrices)

    def _launch(self, x: Tensor, w: PackedMatrices, *, first: bool = False, unfused: bool = False) -> Tensor:
        launch, plan, rule = launch_for(x.device), self.plan, self.rule
        gated = first and rule.gated
        cut = self.config.gate_up if gated else self.config.down
        out = x.new_empty(self.ids.numel(), 2 * w.rows if gated and unfused else w.rows)
        # A CPU has no assembly.
        how = unpacking(
            x.dtype if x.device.type != "cpu" else torch.float32, w.e2m1, w.group, True,
            w.bare and x.dtype == torch.bfloat16,
        )  # fmt: skip
        _packed_rows_kernel[(plan.capacity * -(-w.rows // cut.block_n),)](
            x, w.words, w.scales, rule.pointers(x)[0 if first else 1], plan.order, plan.tiles, plan.count, out,
            plan.capacity,
            N=w.rows, K=w.columns, TOP_K=self.ids.shape[1], M=self.config.height, BLOCK_N=cut.block_n,
            STAGES=cut.stages, FIRST=first, GATED=gated, UNFUSED=unfused, AHEAD=cut.ahead, **w.constants,
            **rule.gate_up, ASM=how.assembly, BASE=how.base, LIFT=how.lift,
            PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap, num_warps=cut.warps,
            launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

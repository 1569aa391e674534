"""Experts for tens of rows each at most: an expert's weights are read once, by all its rows.

A program owns a tile of a plan, which usually has all rows of one expert, and BLOCK_N columns of its product. The
weights are the first operand, because its least height is the greater one. The grid is for the most tiles there can be;
programs of missing tiles end at once. Gate and up are in one tile, so that the program can compute SiLU(gate) * up.
Without a gate, up is divided like down. Another launch adds up each token's weighted rows.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import store_pairs
from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _few_rows_kernel(
    x_ptr,  # FIRST: [tokens, K], otherwise [pairs, K]
    w_ptr,  # GATED: [E, 2 * N, K], gate, then up; otherwise [E, N, K]
    scale_ptr,  # [E, SCALE_COUNT, K / 128], or one scale for all of K if not GROUPED; if SCALE_ROWS
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
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST: tl.constexpr,  # the first product, which is activated
    GATED: tl.constexpr,  # FIRST only: of gate and up
    UNFUSED: tl.constexpr,  # FIRST only: not activated
    SCALE_ROWS: tl.constexpr,  # rows of a matrix that share scales; 0: there are none
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,  # scales are of 128 columns, of which BLOCK_K is a part
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP and FIRST:
        gdc_wait()
    # Down, and any launch between, begins after the wait of all of gate and up's programs, and that wait was for the
    # plan. Other processors wrote it, so read past the first-level cache.
    count = tl.load(count_ptr, cache_modifier=".cg")
    expert = tl.load(tiles_ptr + tile, cache_modifier=".cg")
    start = tl.load(tiles_ptr + capacity + tile, cache_modifier=".cg")
    end = tl.load(tiles_ptr + 2 * capacity + tile, cache_modifier=".cg")
    if OVERLAP:
        if not FIRST:
            gdc_wait()
        gdc_launch_dependents()
    if tile < count:
        row = start + tl.arange(0, M)
        used = row < end
        pair = tl.load(order_ptr + row, mask=used, other=0)
        product = _tile_product(
            x_ptr, w_ptr, scale_ptr, expert, pair // TOP_K if FIRST else pair, used, block,
            N, K, M, BLOCK_N, BLOCK_K, STAGES, GATED, SCALE_ROWS, SCALE_COUNT, GROUPED, PRECISION,
        )  # fmt: skip
        store_pairs(
            product, out_ptr, biases_ptr, expert, pair, used, n, N, True, FIRST, GATED, UNFUSED, ALPHA, LIMIT, GELU,
            BIASES,
        )  # fmt: skip


@triton.jit
def _tile_product(
    x_ptr, w_ptr, scale_ptr, expert, x_row, used, block,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply one expert's rows of weights by the tile's rows of x -> float32 [BLOCK_N, M]; GATED: gate's, then
    up's.
    """
    PARTS: tl.constexpr = 2 if GATED else 1
    index = tl.arange(0, PARTS * BLOCK_N)
    # Rows after the end read the last row and are not stored.
    weight_row = tl.minimum(block * BLOCK_N + index % BLOCK_N, N - 1) + index // BLOCK_N * N
    w_rows = w_ptr + expert.to(tl.int64) * (PARTS * N * K) + weight_row[:, None] * K
    x_rows = x_ptr + x_row.to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)[None, :]
    SCALES: tl.constexpr = K // 128 if GROUPED else 1
    if SCALE_ROWS > 0:
        scales = scale_ptr + (expert * SCALE_COUNT + weight_row // SCALE_ROWS) * SCALES
    acc = tl.zeros([PARTS * BLOCK_N, M], tl.float32)
    for step in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_rows + step + k)
            x = tl.load(x_rows + step + k, mask=used[:, None], other=0.0)
        else:
            inside = step + k < K
            w = tl.load(w_rows + step + k, mask=inside, other=0.0)
            x = tl.load(x_rows + step + k, mask=used[:, None] & inside, other=0.0)
        if SCALE_ROWS > 0:
            w = w.to(tl.float32)  # the direct conversion to bfloat16 is slower than memory
        if GROUPED:
            part = tl.dot(w.to(x.dtype), tl.trans(x), input_precision=PRECISION)
            acc += part * tl.load(scales + step // 128)[:, None]
        else:
            acc = tl.dot(w.to(x.dtype), tl.trans(x), acc, input_precision=PRECISION)
    if SCALE_ROWS > 0 and not GROUPED:
        acc *= tl.load(scales)[:, None]
    return acc


@dataclass(frozen=True, slots=True)
class FewCut:
    """How one of the two products is divided. block_n: columns of the result; gate and up have twice the weight
    rows.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class FewConfig:
    """How experts for few rows are divided. height: rows of a tile."""

    height: int
    gate_up: FewCut
    down: FewCut

    def shared_memory(self, element_size: int, weight_size: int) -> int:
        """Return an upper bound in bytes of copies in flight or in use. Sizes: bytes of an element."""
        return max(
            cut.stages * (parts * cut.block_n * weight_size + self.height * element_size) * cut.block_k
            for cut, parts in ((self.gate_up, 2), (self.down, 1))
        )


@dataclass(frozen=True, slots=True, eq=False)
class FewPass:
    """`ExpertPass` of few rows. Rows of x are read in place, and results are stored in the order of the pairs."""

    h: Tensor
    ids: Tensor
    plan: Plan
    gate_up_matrices: Matrices
    down_matrices: Matrices
    config: FewConfig
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

    def _launch(self, x: Tensor, w: Matrices, *, first: bool = False, unfused: bool = False) -> Tensor:
        launch, plan, rule = launch_for(x.device), self.plan, self.rule
        gated = first and rule.gated
        cut = self.config.gate_up if gated else self.config.down
        rows = w.weight.shape[1]
        n = rows // 2 if gated else rows
        out = x.new_empty(self.ids.numel(), rows if unfused else n)
        _few_rows_kernel[(plan.capacity * -(-n // cut.block_n),)](
            x, *w.pointers, rule.pointers(x)[0 if first else 1], plan.order, plan.tiles, plan.count, out, plan.capacity,
            N=n, K=x.shape[1], TOP_K=self.ids.shape[1], M=self.config.height, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
            STAGES=cut.stages, FIRST=first, GATED=gated, UNFUSED=unfused, **w.constants, **rule.gate_up,
            PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap, num_warps=cut.warps,
            launch_pdl=launch.overlap,
        )  # fmt: skip
        return out

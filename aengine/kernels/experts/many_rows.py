"""Experts for many tokens: grouped products of sorted rows, at the speed of the matrix units.

Rows lie sorted by expert; a tile of a plan is up to BLOCK_M neighbours of one expert. Programs take (tile, block of
columns) items in turn, columns first, so that neighbours share an expert's weights in the second-level cache. Rows and
weights come through tensor descriptors (TMA where the device has it); rows of the next expert that a tile reads beyond
its own are not stored. SiLU(gate) * up is the end of the first product; the second's rows are weighted and added up in
order by another launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from aengine.kernels.experts.activation import store_pairs
from aengine.kernels.experts.routing.plan import Plan
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit(do_not_specialize=["capacity"])
def _many_rows_kernel(
    x_ptr,  # [tokens, K], GATHER only
    x_rows,  # descriptor of [pairs, K], sorted; without GATHER
    w_rows,  # descriptor of [E * 2, N, K] (GATED: each expert's gate, then up), otherwise [E, N, K]
    out_ptr,  # [pairs, N], sorted; APART: [pairs, 2 * N], gate, then up
    biases_ptr,  # [E, 2 * N or N], BIASES only
    order_ptr,  # [pairs], GATHER only
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    capacity,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    APART: tl.constexpr,  # GATED only: gate and up are stored as they are
    GATHER: tl.constexpr,  # rows of x are read where they are
    FLATTEN: tl.constexpr,  # the next item's first loads are on their way before this one ends
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    BIASES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PARTS: tl.constexpr = 2 if GATED else 1
    rows = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    items = tl.load(count_ptr) * blocks
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), flatten=FLATTEN):
        tile = item // blocks
        column = item % blocks * BLOCK_N
        expert = tl.load(tiles_ptr + tile)
        start = tl.load(tiles_ptr + capacity + tile)
        end = tl.load(tiles_ptr + 2 * capacity + tile)
        if GATHER:
            token = tl.load(order_ptr + start + rows, mask=start + rows < end, other=0) // TOP_K
            gathered = x_ptr + token.to(tl.int64)[:, None] * K + k
        acc = tl.zeros([BLOCK_M, PARTS * BLOCK_N], tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            if not GATHER:
                x = x_rows.load([start, step])
            elif K % BLOCK_K == 0:
                x = tl.load(gathered + step)
            else:
                x = tl.load(gathered + step, mask=step + k < K, other=0.0)
            w = w_rows.load([expert * PARTS, column, step]).reshape(PARTS * BLOCK_N, BLOCK_K)
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        row, n = start + rows, column + tl.arange(0, BLOCK_N)
        store_pairs(
            acc, out_ptr, biases_ptr, expert, row, row < end, n, N, False, GATED, APART, ALPHA, LIMIT, GELU, BIASES
        )


@keep_variants
@triton.jit
def _sort_rows_kernel(
    x_ptr,  # [tokens, K]
    ids_ptr,  # [pairs]
    places_ptr,  # [pairs]
    out_ptr,  # [pairs, K]
    E: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x_ptr + token.to(tl.int64) * K + k, mask=k < K, other=0)
    for j in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + j)
        row = tl.load(places_ptr + token * TOP_K + j)  # anything, where the pair goes nowhere
        inside = k < tl.where((expert >= 0) & (expert < E), K, 0)
        tl.store(out_ptr + row.to(tl.int64) * K + k, value, mask=inside)


def sort_rows(x: Tensor, plan: Plan, ids: Tensor) -> Tensor:
    """x [tokens, k] -> each token's row at the places of all its pairs, ids [tokens, top_k]: [pairs, k]."""
    (tokens, k), top_k = x.shape, ids.shape[1]
    out = x.new_empty(tokens * top_k, k)
    block = min(2048, power_of_two(k))
    overlap = launch_for(x.device).overlap
    _sort_rows_kernel[(tokens, triton.cdiv(k, block))](
        x, ids, plan.places, out, E=len(plan.ends), K=k, TOP_K=top_k, BLOCK=block, OVERLAP=overlap,
        num_warps=max(1, block // 512), launch_pdl=overlap,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class ManyCut:
    """How one of the two products is cut up. crowd: programs of a processor; 0: one program for each item."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    crowd: int = 1
    flatten: bool = False


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """How experts for many rows are cut up. height: rows of a tile; gather: without a sorted copy of the rows."""

    height: int
    gate_up: ManyCut
    down: ManyCut
    gather: bool = False

    def shared_memory(self, element_size: int, weight_size: int) -> int:
        """Bytes at most: copies on their way, with those that are being multiplied, and where the next tile's loads
        begin early, what leaves this one. Sizes: bytes of an element."""
        return max(
            cut.stages * (parts * cut.block_n * weight_size + self.height * element_size) * cut.block_k
            + cut.flatten * self.height * cut.block_n * element_size
            for cut, parts in ((self.gate_up, 2), (self.down, 1))
        )


@dataclass(slots=True, eq=False)
class ManyPass:
    """`ExpertPass` of many rows, in the order of the plan. Takes memory for a sorted copy of h, unless it gathers."""

    h: Tensor
    ids: Tensor
    plan: Plan
    gate_up_matrices: Tensor
    down_matrices: Tensor
    config: ManyConfig
    rule: ExpertRule
    _sorted_rows: Tensor | None = None

    @property
    def sorted(self) -> bool:
        return True

    def activated(self) -> Tensor:
        return self._gate_up(apart=False)

    def gate_up(self) -> Tensor:
        return self._gate_up(apart=True)

    def down(self, inner: Tensor) -> Tensor:
        w, out = self.down_matrices, self._sorted_rows  # whose contents have served
        out = inner.new_empty(len(inner), w.shape[1]) if out is None else out
        self._launch(None, inner, w, out, self.config.down)
        return out

    def _gate_up(self, apart: bool) -> Tensor:
        w = self.gate_up_matrices
        self._sorted_rows = None if self.config.gather else sort_rows(self.h, self.plan, self.ids)
        out = self.h.new_empty(self.ids.numel(), w.shape[1] // (1 if apart else 2))
        self._launch(self.h, self._sorted_rows, w, out, self.config.gate_up, gated=True, apart=apart)
        return out

    def _launch(
        self, gathered: Tensor | None, x: Tensor | None, w: Tensor, out: Tensor, cut: ManyCut, *,
        gated: bool = False, apart: bool = False,
    ) -> None:  # fmt: skip
        """x [pairs, k]: sorted rows; None: rows of `gathered`."""
        launch, plan, rule, height = launch_for(w.device), self.plan, self.rule, self.config.height
        parts, k = 2 if gated else 1, w.shape[2]
        n = w.shape[1] // parts
        most = plan.capacity * -(-n // cut.block_n)
        weights = TensorDescriptor.from_tensor(w.view(-1, n, k), [parts, cut.block_n, cut.block_k])
        rows = weights if x is None else TensorDescriptor.from_tensor(x, [height, cut.block_k])
        _many_rows_kernel[(min(most, cut.crowd * launch.processors) if cut.crowd else most,)](
            w if gathered is None else gathered, rows, weights, out, rule.pointers(w)[0 if gated else 1],
            plan.order, plan.tiles, plan.count, plan.capacity,
            N=n, K=k, TOP_K=self.ids.shape[1], BLOCK_M=height, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, GATED=gated,
            APART=apart, GATHER=x is None, FLATTEN=cut.flatten, **rule.gate_up,
            PRECISION="ieee" if w.element_size() > 2 else "tf32", OVERLAP=launch.overlap, num_warps=cut.warps,
            num_stages=cut.stages, launch_pdl=launch.overlap,
        )  # fmt: skip

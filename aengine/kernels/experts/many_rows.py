"""Experts for many tokens: grouped products of sorted rows, at the speed of the tensor cores.

Rows are sorted by expert. A tile of a plan is up to BLOCK_M neighbours of one expert. Programs take items in turn, each
a tile and a block of columns, columns first. So neighbours share an expert's weights in the second-level cache. Rows
and weights are loaded through tensor descriptors, by TMA if the device has it. A tile may read rows of the next expert;
they are not stored. The first product ends with its activation. Another launch adds up the weighted rows of the second.
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
    out_ptr,  # [pairs, N], sorted; GATED and UNFUSED: [pairs, 2 * N], gate, then up
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
    FIRST: tl.constexpr,  # the first product, which is activated
    GATED: tl.constexpr,  # FIRST only: of gate and up
    UNFUSED: tl.constexpr,  # FIRST only: not activated
    GATHER: tl.constexpr,  # rows of x are read in place
    FLATTEN: tl.constexpr,  # the next item's first loads are issued before this one ends
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
            acc, out_ptr, biases_ptr, expert, row, row < end, n, N, False, FIRST, GATED, UNFUSED, ALPHA, LIMIT, GELU,
            BIASES,
        )  # fmt: skip


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
        row = tl.load(places_ptr + token * TOP_K + j)  # undefined if the pair goes nowhere
        inside = k < tl.where((expert >= 0) & (expert < E), K, 0)
        tl.store(out_ptr + row.to(tl.int64) * K + k, value, mask=inside)


def sort_rows(x: Tensor, plan: Plan, ids: Tensor) -> Tensor:
    """Copy each row of x [tokens, k] to the places of its pairs, ids [tokens, top_k]: [pairs, k]."""
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
    """How one of the two products is divided. crowd: programs of a processor; 0: one program for each item."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    crowd: int = 1
    flatten: bool = False


@dataclass(frozen=True, slots=True)
class ManyConfig:
    """How experts for many rows are divided. height: rows of a tile. gather: do without a sorted copy of the rows."""

    height: int
    gate_up: ManyCut
    down: ManyCut
    gather: bool = False

    def shared_memory(self, element_size: int, weight_size: int) -> int:
        """Return an upper bound in bytes: copies in flight or in use, and a tile being stored if the next loads begin
        early.

        Sizes: bytes of an element.
        """
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
        return self._gate_up(unfused=False)

    def gate_up(self) -> Tensor:
        return self._gate_up(unfused=True)

    def down(self, inner: Tensor) -> Tensor:
        w, out = self.down_matrices, self._sorted_rows  # its contents are no longer needed
        out = inner.new_empty(len(inner), w.shape[1]) if out is None else out
        self._launch(None, inner, w, out)
        return out

    def _gate_up(self, unfused: bool) -> Tensor:
        w = self.gate_up_matrices
        self._sorted_rows = None if self.config.gather else sort_rows(self.h, self.plan, self.ids)
        out = self.h.new_empty(self.ids.numel(), w.shape[1] // (1 if unfused else self.rule.parts))
        self._launch(self.h, self._sorted_rows, w, out, first=True, unfused=unfused)
        return out

    def _launch(
        self, gathered: Tensor | None, x: Tensor | None, w: Tensor, out: Tensor, *,
        first: bool = False, unfused: bool = False,
    ) -> None:  # fmt: skip
        """x: sorted rows [pairs, k]; None means rows of `gathered`."""
        launch, plan, rule, height = launch_for(w.device), self.plan, self.rule, self.config.height
        gated = first and rule.gated
        cut = self.config.gate_up if gated else self.config.down
        parts, k = 2 if gated else 1, w.shape[2]
        n = w.shape[1] // parts
        most = plan.capacity * -(-n // cut.block_n)
        weights = TensorDescriptor.from_tensor(w.view(-1, n, k), [parts, cut.block_n, cut.block_k])
        rows = weights if x is None else TensorDescriptor.from_tensor(x, [height, cut.block_k])
        _many_rows_kernel[(min(most, cut.crowd * launch.processors) if cut.crowd else most,)](
            w if gathered is None else gathered, rows, weights, out, rule.pointers(w)[0 if first else 1],
            plan.order, plan.tiles, plan.count, plan.capacity,
            N=n, K=k, TOP_K=self.ids.shape[1], BLOCK_M=height, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, FIRST=first,
            GATED=gated, UNFUSED=unfused, GATHER=x is None, FLATTEN=cut.flatten, **rule.gate_up,
            PRECISION="ieee" if w.element_size() > 2 else "tf32", OVERLAP=launch.overlap, num_warps=cut.warps,
            num_stages=cut.stages, launch_pdl=launch.overlap,
        )  # fmt: skip

"""Experts for some tokens, tens of rows for each expert at most: each expert's weights are read once, by all its rows.

A program owns a tile of a plan, all rows of one expert as a rule, and BLOCK_N columns of its product; the weights are
the first operand, which is the one with the greater least height. The grid is for as many tiles as there may be; those
that are not there end at once. Gate and up lie in one tile, so that SiLU(gate) * up is its end. After down, the last
program to arrive at a block of columns adds up each token's weighted rows in order: deterministic, and no third launch.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.plan import Plan, make_plan
from aengine.kernels.experts.weighted_sum import add_weighted_rows, weighted_sum
from aengine.kernels.launch import launch_for


@triton.jit(do_not_specialize=["tokens", "capacity"])
def _few_rows_kernel(
    x_ptr,  # GATED: [tokens, K], otherwise [pairs, K]
    w_ptr,  # GATED: [E, 2 * N, K], gate, then up; otherwise [E, N, K]
    order_ptr,  # [pairs]
    tiles_ptr,  # [3, capacity]
    count_ptr,  # [1]
    out_ptr,  # [pairs, N]
    ids_ptr,  # [tokens, TOP_K], SUM only, as are those below
    weights_ptr,  # [tokens, TOP_K]
    residual_ptr,  # [tokens, N], to which the weighted rows are added
    arrived_ptr,  # [blocks of columns] int32, zero between launches
    tokens,
    capacity,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    M: tl.constexpr,  # the height of a tile
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    SUM: tl.constexpr,
    SUM_TOKENS: tl.constexpr,  # tokens that are added up at once
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(count_ptr)
    if tile < count:
        expert = tl.load(tiles_ptr + tile)
        row = tl.load(tiles_ptr + capacity + tile) + tl.arange(0, M)
        used = row < tl.load(tiles_ptr + 2 * capacity + tile)
        pair = tl.load(order_ptr + row, mask=used, other=0)
        product = _tile_product(
            x_ptr, w_ptr, expert, pair // TOP_K if GATED else pair, used, block,
            N, K, M, BLOCK_N, BLOCK_K, STAGES, GATED, PRECISION,
        )  # fmt: skip
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(product, (2, BLOCK_N, M)), (1, 2, 0)))
            product = gate * tl.sigmoid(gate) * up
        out = out_ptr + pair.to(tl.int64)[None, :] * N + n[:, None]
        tl.store(out, product.to(out_ptr.dtype.element_ty), mask=used[None, :] & (n < N)[:, None])
    if SUM:  # noqa: SIM102 - one is known to the compiler
        if tile < tl.maximum(count, 1):  # where no pair goes anywhere, the first has come nevertheless
            _add_up_last(
                out_ptr, ids_ptr, weights_ptr, residual_ptr, arrived_ptr + block, tl.maximum(count, 1), n[None, :],
                tokens, E, N, TOP_K, SUM_TOKENS,
            )  # fmt: skip


@triton.jit
def _add_up_last(
    rows_ptr, ids_ptr, weights_ptr, residual_ptr, arrived_ptr, programs, n, tokens,
    E: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, SUM_TOKENS: tl.constexpr,
):  # fmt: skip
    """The last of so many programs adds the tokens' weighted rows to the residual, in its columns n [1, BLOCK_N]."""
    tl.debug_barrier()  # every thread's rows are stored before one of them announces them
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == programs - 1:
        tl.debug_barrier()
        tl.store(arrived_ptr, 0)
        for begin in range(0, tokens, SUM_TOKENS):
            t = begin + tl.arange(0, SUM_TOKENS)[:, None]
            inside = (t < tokens) & (n < N)
            place = residual_ptr + t.to(tl.int64) * N + n
            total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            total = add_weighted_rows(
                total, rows_ptr, ids_ptr, ids_ptr, weights_ptr, tl.minimum(t, tokens - 1), n, N, E, TOP_K, False
            )  # fmt: skip
            tl.store(place, total.to(residual_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile_product(
    x_ptr, w_ptr, expert, x_row, used, block,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One expert's rows of weights times the tile's rows of x -> float32 [BLOCK_N, M]; GATED: gate's, then up's."""
    PARTS: tl.constexpr = 2 if GATED else 1
    index = tl.arange(0, PARTS * BLOCK_N)
    # Rows past the end read the last row, and are not stored.
    weight_row = tl.minimum(block * BLOCK_N + index % BLOCK_N, N - 1) + index // BLOCK_N * N
    w_rows = w_ptr + expert.to(tl.int64) * (PARTS * N * K) + weight_row[:, None] * K
    x_rows = x_ptr + x_row.to(tl.int64)[:, None] * K
    k = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([PARTS * BLOCK_N, M], tl.float32)
    for step in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_rows + step + k)
            x = tl.load(x_rows + step + k, mask=used[:, None], other=0.0)
        else:
            inside = step + k < K
            w = tl.load(w_rows + step + k, mask=inside, other=0.0)
            x = tl.load(x_rows + step + k, mask=used[:, None] & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
    return acc


@dataclass(frozen=True, slots=True)
class FewCut:
    """How one of the two products is cut up. block_n: columns of the result; gate and up have twice the weight rows."""

    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class FewConfig:
    """How experts for few rows are cut up. height: rows of a tile; sum_last: by the last to arrive, not by a launch."""

    height: int
    gate_up: FewCut
    down: FewCut
    sum_last: bool = True

    def shared_memory(self, element_size: int) -> int:
        """Bytes at most: copies on their way, with those that are being multiplied."""
        return max(
            cut.stages * (parts * cut.block_n + self.height) * cut.block_k * element_size
            for cut, parts in ((self.gate_up, 2), (self.down, 1))
        )


def few_rows(
    h: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor, residual: Tensor, config: FewConfig,
    arrived: Tensor,
) -> Tensor:  # fmt: skip
    """h [tokens, hidden], gate_up [E, 2 * inter, hidden], down [E, hidden, inter], ids, weights [tokens, k] ->
    `residual` [tokens, hidden], with the weighted sum added in its place; all contiguous.

    arrived: zeros int32, one for each of down's blocks of columns; zeros again afterwards.
    """
    plan = make_plan(ids, down.shape[0], config.height)
    activated = h.new_empty(ids.numel(), down.shape[2])
    rows = h.new_empty(ids.numel(), h.shape[1])
    _launch(h, gate_up, plan, activated, config.height, config.gate_up, ids, weights, residual, arrived, gated=True)
    _launch(
        activated, down, plan, rows, config.height, config.down, ids, weights, residual, arrived,
        gated=False, summed=config.sum_last,
    )  # fmt: skip
    return residual if config.sum_last else weighted_sum(rows, ids, weights, residual, down.shape[0])


def _launch(
    x: Tensor, w: Tensor, plan: Plan, out: Tensor, height: int, cut: FewCut, ids: Tensor, weights: Tensor,
    residual: Tensor, arrived: Tensor, *, gated: bool, summed: bool = False,
) -> None:  # fmt: skip
    launch = launch_for(x.device)
    n = out.shape[1]
    _few_rows_kernel[(plan.capacity * -(-n // cut.block_n),)](
        x, w, plan.order, plan.tiles, plan.count, out, ids, weights, residual, arrived, len(ids), plan.capacity,
        E=w.shape[0], N=n, K=w.shape[2], TOP_K=ids.shape[1], M=height, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k,
        STAGES=cut.stages, GATED=gated, SUM=summed, SUM_TOKENS=16,
        PRECISION="ieee" if x.element_size() > 2 else "tf32", OVERLAP=launch.overlap,
        num_warps=cut.warps, launch_pdl=launch.overlap,
    )  # fmt: skip

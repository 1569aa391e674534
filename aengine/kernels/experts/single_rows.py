"""Experts for one to a few tokens: every (token, expert) pair is a product of a row with that expert's matrices.

Nothing is sorted, and two launches are enough: gate, up and SiLU(gate) * up of all pairs; then down, where a program
has the same rows of all of a token's experts, so that it can add them up. Where two tokens share an expert it is read
twice, the second time mostly from the second-level cache.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.matrices import Matrices
from aengine.kernels.launch import launch_for, power_of_two


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [tokens, K]
    w_ptr,  # [E, 2 * N, K]: gate, then up
    scale_ptr,  # [E, SCALE_COUNT, K / 128], or 1 in place of K / 128 where not GROUPED; where there are scales
    ids_ptr,  # [pairs]
    out_ptr,  # [pairs, N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,  # rows of a matrix that share scales; 0: there are none
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,  # scales are of 128 columns, of which BLOCK_K is a multiple
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pair = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    if OVERLAP:
        gdc_wait()
        # Only now: a dependent's programs run once all of this launch's have come here, so they may read the ids.
        gdc_launch_dependents()
    expert = tl.load(ids_ptr + pair)
    if (expert >= 0) & (expert < E):
        # Rows past the end read the last row, and are not stored.
        row = tl.minimum(n, N - 1)
        gate_rows = w_ptr + expert.to(tl.int64) * (2 * N * K) + row[:, None] * K
        x_row = x_ptr + (pair // TOP_K).to(tl.int64) * K
        SCALES: tl.constexpr = K // 128 if GROUPED else 1
        if SCALE_ROWS > 0:
            scales = scale_ptr + expert * (SCALE_COUNT * SCALES)
            ONE: tl.constexpr = SCALE_ROWS % BLOCK_N == 0 and N % BLOCK_N == 0  # all rows of a block have the same
            if ONE:
                row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, 1)
            gate_scales = scales + row // SCALE_ROWS * SCALES  # [1] or [BLOCK_N]
            up_scales = scales + (N + row) // SCALE_ROWS * SCALES
        gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for step in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            inside = step + k < K
            if K % BLOCK_K == 0:
                w_gate = tl.load(gate_rows + step + k)
                w_up = tl.load(gate_rows + N * K + step + k)
            else:
                w_gate = tl.load(gate_rows + step + k, mask=inside, other=0.0)
                w_up = tl.load(gate_rows + N * K + step + k, mask=inside, other=0.0)
            x = tl.load(x_row + step + k, mask=inside, other=0.0).to(tl.float32)
            if GROUPED:
                gate += w_gate.to(tl.float32) * _scaled(x, gate_scales, step, K, 1 if ONE else BLOCK_N, BLOCK_K)
                up += w_up.to(tl.float32) * _scaled(x, up_scales, step, K, 1 if ONE else BLOCK_N, BLOCK_K)
            else:
                gate += w_gate.to(tl.float32) * x
                up += w_up.to(tl.float32) * x
        total, factor = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        if SCALE_ROWS > 0 and not GROUPED:
            total *= tl.load(gate_scales)
            factor *= tl.load(up_scales)
        result = total * tl.sigmoid(total) * factor
        tl.store(out_ptr + pair.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _scaled(x, scales, step, K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [1, BLOCK_K] of columns from `step` on, each 128 times their scale; scales: rows' first -> [ROWS, BLOCK_K]."""
    GROUPS: tl.constexpr = BLOCK_K // 128
    group = step // 128 + tl.arange(0, GROUPS)[None, :]
    scale = tl.load(scales[:, None] + group, mask=group < K // 128, other=0.0)
    return tl.reshape(tl.reshape(x, [1, GROUPS, 128]) * scale[:, :, None], [ROWS, BLOCK_K])


@triton.jit
def _down_kernel(
    x_ptr,  # [pairs, K]
    w_ptr,  # [E, N, K]
    scale_ptr,  # as above
    ids_ptr,  # [pairs]
    weights_ptr,  # [pairs]
    residual_ptr,  # [tokens, N]; may be out_ptr
    out_ptr,  # [tokens, N]
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,  # TOP_K, padded to a power of two
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COUNT: tl.constexpr,
    GROUPED: tl.constexpr,  # scales are of 128 columns, of which BLOCK_K is a part
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token = tl.program_id(0) // blocks
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, WIDTH)
    k = tl.arange(0, BLOCK_K)
    if OVERLAP:
        gdc_launch_dependents()
    # Whoever chose the experts is complete: the kernel before this one had waited before it let this one begin.
    # Past the first-level cache, where another layer's ids may be left.
    expert = tl.load(ids_ptr + token * TOP_K + j, mask=j < TOP_K, other=-1, cache_modifier=".cg")
    known = (expert >= 0) & (expert < E)
    # Rows past the end read the last row, and are not stored.
    row = tl.minimum(n, N - 1)
    rows = expert.to(tl.int64)[None, :] * (N * K) + row[:, None] * K
    w_rows = w_ptr + rows[:, :, None] + k[None, None, :]
    x_rows = x_ptr + (token * TOP_K + j).to(tl.int64)[:, None] * K + k[None, :]
    first = known[:, None] & (k < K)[None, :]
    w = tl.load(w_rows, mask=first[None, :, :], other=0.0)  # on its way while the kernel before this one ends
    if OVERLAP:
        gdc_wait()
    residual = tl.load(residual_ptr + token.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + token * TOP_K + j, mask=known, other=0.0)
    SCALES: tl.constexpr = K // 128 if GROUPED else 1
    if SCALE_ROWS > 0:
        if SCALE_ROWS % BLOCK_N == 0:
            row = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, 1)
        scales = scale_ptr + (expert[None, :] * SCALE_COUNT + row[:, None] // SCALE_ROWS) * SCALES  # [.., WIDTH]
    acc = tl.zeros([BLOCK_N, WIDTH, BLOCK_K], tl.float32)
    for step in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        inside = known[:, None] & (step + k < K)[None, :]
        x = tl.load(x_rows + step, mask=inside, other=0.0).to(tl.float32)[None, :, :]
        if GROUPED:
            x *= tl.load(scales + step // 128, mask=known[None, :], other=0.0)[:, :, None]
        acc += tl.load(w_rows + step, mask=inside[None, :, :], other=0.0).to(tl.float32) * x
    x = tl.load(x_rows, mask=first, other=0.0).to(tl.float32)[None, :, :]
    if GROUPED:
        x *= tl.load(scales, mask=known[None, :], other=0.0)[:, :, None]
    acc += w.to(tl.float32) * x
    sums = tl.sum(acc, axis=2)  # [BLOCK_N, WIDTH]
    if SCALE_ROWS > 0 and not GROUPED:
        sums *= tl.load(scales, mask=known[None, :], other=0.0)
    result = residual + tl.sum(sums * weights[None, :], axis=1)
    tl.store(out_ptr + token.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@dataclass(frozen=True, slots=True)
class SingleCut:
    """How one of the two products is cut up. block_k: columns of an expert; down's first are loaded before the wait."""

    block_n: int
    block_k: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class SingleConfig:
    """How experts for single rows are cut up."""

    gate_up: SingleCut
    down: SingleCut


def single_rows(
    h: Tensor, gate_up: Matrices, down: Matrices, ids: Tensor, weights: Tensor, residual: Tensor, config: SingleConfig
) -> Tensor:
    """h [tokens, hidden], gate_up [E, 2 * inter, hidden], down [E, hidden, inter], ids, weights [tokens, k] ->
    `residual` [tokens, hidden], with the weighted sum added in its place; all contiguous."""
    (tokens, hidden), (experts, _, inter), top_k = h.shape, down.weight.shape, ids.shape[1]
    overlap = launch_for(h.device).overlap
    activated = h.new_empty(tokens * top_k, inter)
    cut = config.gate_up
    _gate_up_kernel[(tokens * top_k * -(-inter // cut.block_n),)](
        h, *gate_up.pointers, ids, activated,
        E=experts, N=inter, K=hidden, TOP_K=top_k, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, STAGES=cut.stages,
        **gate_up.constants, OVERLAP=overlap, num_warps=cut.warps, launch_pdl=overlap,
    )  # fmt: skip
    cut = config.down
    _down_kernel[(tokens * -(-hidden // cut.block_n),)](
        activated, *down.pointers, ids, weights, residual, residual,
        E=experts, N=hidden, K=inter, TOP_K=top_k, WIDTH=power_of_two(top_k), BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k, STAGES=cut.stages, **down.constants, OVERLAP=overlap,
        num_warps=cut.warps, launch_pdl=overlap,
    )  # fmt: skip
    return residual

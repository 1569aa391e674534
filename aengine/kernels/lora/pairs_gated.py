"""Gate and up of every (token, expert) pair with what the token's adapter adds, and what the experts make of both.

A program owns some columns of gate and the same of up of one pair.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import activated
from aengine.kernels.experts.apart import Apart
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for
from aengine.kernels.lora.pairs import PairFactors, low_rank, pair_of
from aengine.kernels.variants import keep_variants

BLOCK_N = 64


@keep_variants
@triton.jit
def _gated_kernel(
    y_ptr,  # [rows, 2 * N]: gate, then up
    table_ptr,  # [E] int64: where each expert's B lies, [places, 2 * N, RANK] of y's type
    inner_ptr,  # [rows, 2 * RANK] float32
    out_ptr,  # [rows, N]
    order_ptr,  # [rows], SORTED only
    ids_ptr,  # [pairs]
    places_ptr,  # [tokens]
    ends_ptr,  # [E], SORTED only
    N: tl.constexpr,
    RANK: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    _, expert, place = pair_of(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E, TOP_K, SORTED)
    if expert >= 0:
        y_at = y_ptr + row.to(tl.int64) * (2 * N) + n
        gate = tl.load(y_at, mask=n < N, other=0.0).to(tl.float32)
        up = tl.load(y_at + N, mask=n < N, other=0.0).to(tl.float32)
        if place > 0:
            b_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(y_ptr.dtype.element_ty))
            b_rows = b_ptr + place * (2 * N * RANK) + n * RANK
            inner = inner_ptr + row.to(tl.int64) * (2 * RANK)
            gate += low_rank(b_rows, inner, n, N, RANK)
            up += low_rank(b_rows + N * RANK, inner + RANK, n, N, RANK)
        result = activated(gate, up, ALPHA, LIMIT, GELU)
        tl.store(out_ptr + row.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


def gate_pairs(
    y: Tensor, inner: Tensor, factors: PairFactors, rule: ExpertRule, apart: Apart, ids: Tensor, places: Tensor
) -> Tensor:
    """y [pairs, 2 * n] and inner [pairs, 2 * rank], in the order of `apart`'s rows -> [pairs, n].

    ids int32 [tokens, top_k], places int32 [tokens]; all contiguous.
    """
    pairs, n, top_k = len(y), y.shape[1] // 2, ids.shape[1]
    out = y.new_empty(pairs, n)
    overlap = launch_for(y.device).overlap
    alpha, limit = (0.0, 0.0) if rule.clamp is None else (rule.clamp.alpha, rule.clamp.limit)
    _gated_kernel[(pairs, -(-n // BLOCK_N))](
        y, factors.b, inner, out, apart.plan.order, ids, places, apart.plan.ends,
        N=n, RANK=factors.rank, E=len(apart.plan.ends), TOP_K=top_k, SORTED=apart.sorted, BLOCK_N=BLOCK_N,
        ALPHA=alpha, LIMIT=limit, GELU=rule.gelu, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out

"""What a token's experts give, with what its adapter adds in each of them, weighted and summed onto a residual.

A program owns some columns of one token.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.apart import Apart
from aengine.kernels.launch import launch_for
from aengine.kernels.lora.pairs import PairFactors, low_rank
from aengine.kernels.variants import keep_variants

BLOCK_N = 64


@keep_variants
@triton.jit
def _sum_kernel(
    rows_ptr,  # [rows, N]
    table_ptr,  # [E] int64: where each expert's B lies, [places, N, RANK] of the rows' type
    inner_ptr,  # [rows, RANK] float32
    ids_ptr,  # [pairs]
    weights_ptr,  # [pairs]
    places_ptr,  # [tokens]
    row_of_ptr,  # [pairs], SORTED only; otherwise the pair is its row
    residual_ptr,  # [tokens, N], ADD only; may be out_ptr
    out_ptr,  # [tokens, N]
    N: tl.constexpr,
    RANK: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(places_ptr + t).to(tl.int64)
    at = t.to(tl.int64) * N + n
    total = tl.zeros([BLOCK_N], tl.float32)
    if ADD:
        total = tl.load(residual_ptr + at, mask=n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        pair = t * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        if (expert >= 0) & (expert < E):
            row = tl.load(row_of_ptr + pair) if SORTED else pair
            value = tl.load(rows_ptr + row.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
            if place > 0:
                b_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(rows_ptr.dtype.element_ty))
                b_rows = b_ptr + place * (N * RANK) + n * RANK
                value += low_rank(b_rows, inner_ptr + row.to(tl.int64) * RANK, n, N, RANK)
            total += tl.load(weights_ptr + pair) * value
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=n < N)


def sum_pairs(
    rows: Tensor, inner: Tensor, factors: PairFactors, apart: Apart, ids: Tensor, weights: Tensor, places: Tensor,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """`residual` [tokens, n], used up, or nothing, plus its weighted rows [pairs, n], each with B inner [pairs, rank].

    ids int32 [tokens, top_k]; weights float32 the same; places int32 [tokens]; all contiguous.
    """
    (tokens, top_k), n = ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, n) if residual is None else residual
    overlap = launch_for(rows.device).overlap
    _sum_kernel[(tokens, -(-n // BLOCK_N))](
        rows, factors.b, inner, ids, weights, places, apart.plan.places, out, out,
        N=n, RANK=factors.rank, E=len(apart.plan.ends), TOP_K=top_k, SORTED=apart.sorted, BLOCK_N=BLOCK_N,
        ADD=residual is not None, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out

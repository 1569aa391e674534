"""The sum of each token's weighted rows, in order and in float32, plus a residual."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _weighted_sum_kernel(
    rows_ptr,  # [pairs, N]
    ids_ptr,  # [pairs]
    places_ptr,  # [pairs]: the row of each pair, SORTED only; otherwise the pair is its row
    weights_ptr,  # [pairs]
    residual_ptr,  # [tokens, N], ADD only; may be out_ptr
    out_ptr,  # [tokens, N]
    N: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SORTED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = t.to(tl.int64) * N + n
    total = tl.zeros([BLOCK], tl.float32)
    if ADD:
        total = tl.load(residual_ptr + place, mask=n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP_K):
        pair = t * TOP_K + j
        expert = tl.load(ids_ptr + pair)
        used = (expert >= 0) & (expert < E)
        row = pair
        if SORTED:
            row = tl.load(places_ptr + pair)  # undefined if the pair goes nowhere
        weight = tl.load(weights_ptr + pair)
        inside = n < tl.where(used, N, 0)
        value = tl.load(rows_ptr + row.to(tl.int64) * N + n, mask=inside, other=0.0, cache_modifier=".cg")
        total += weight * value.to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=n < N)


def weighted_sum(
    rows: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None, experts: int, places: Tensor | None = None
) -> Tensor:
    """rows [tokens * k, n], weighted -> [tokens, n], plus `residual` [tokens, n], which becomes the result.

    Args:
        ids: [tokens, k]. A pair whose id is not in 0..experts-1 adds nothing.
        weights: [tokens, k].
        residual: contiguous; None means zeros.
        places: int32 [tokens * k], the row of each pair; None means the order of the pairs.
    """
    tokens, n = len(ids), rows.shape[1]
    out = rows.new_empty(tokens, n) if residual is None else residual
    block = min(2048, power_of_two(n))
    overlap = launch_for(rows.device).overlap
    _weighted_sum_kernel[(tokens, triton.cdiv(n, block))](
        rows, ids, ids if places is None else places, weights, out, out,
        N=n, E=experts, TOP_K=ids.shape[1], BLOCK=block, SORTED=places is not None, ADD=residual is not None,
        OVERLAP=overlap, num_warps=max(1, block // 512), launch_pdl=overlap,
    )  # fmt: skip
    return out

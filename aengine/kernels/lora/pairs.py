"""What the adapter of a token adds in each of its experts: y += B A x, pair by pair, with plain multiply-adds.

Rows lie sorted by expert, as a plan says. A program reads the whole of A, or some rows of B, for a single pair: right
for any mix of adapters and experts, and as slow as all these bytes.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.experts.plan import Plan
from aengine.kernels.launch import power_of_two
from aengine.kernels.lora.base import AdapterWeights
from aengine.kernels.variants import keep_variants


@triton.jit
def _pair(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E: tl.constexpr, TOP_K: tl.constexpr):
    """A sorted row's expert and the place of its token's adapter, 0 for none; for what lies behind all rows 0 and 0."""
    known = row < tl.load(ends_ptr + E - 1)
    pair = tl.load(order_ptr + row, mask=known, other=0)
    expert = tl.load(ids_ptr + pair, mask=known, other=0)
    return expert, tl.load(places_ptr + pair // TOP_K, mask=known, other=0).to(tl.int64)


@keep_variants
@triton.jit
def _pairs_shrink_kernel(
    x_ptr,  # [pairs, K], sorted
    table_ptr,  # [E] int64: where each expert's A lies, [places, R, K] of x's type
    inner_ptr,  # [pairs, R] float32
    order_ptr,  # [pairs]
    ids_ptr,  # [pairs]
    places_ptr,  # [tokens]
    ends_ptr,  # [E]
    R: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    expert, place = _pair(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E, TOP_K)
    if place > 0:
        a_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
        a_rows = (a_ptr + place * (R * K) + r * K)[:, None]
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for step in tl.range(0, K, BLOCK_K):
            inside = step + k < K
            a = tl.load(a_rows + step + k[None, :], mask=(r < R)[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + row.to(tl.int64) * K + step + k, mask=inside, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        tl.store(inner_ptr + row * R + r, tl.sum(acc, axis=1), mask=r < R)


@keep_variants
@triton.jit
def _pairs_expand_kernel(
    y_ptr,  # [pairs, N], sorted
    table_ptr,  # [E] int64: where each expert's B lies, [places, N, RANK] of y's type
    inner_ptr,  # [pairs, R] float32
    order_ptr,
    ids_ptr,
    places_ptr,
    ends_ptr,
    N: tl.constexpr,
    R: tl.constexpr,
    RANK: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, place = _pair(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E, TOP_K)
    if place > 0:
        b_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(y_ptr.dtype.element_ty))
        inside = n < N
        part = n // (N * RANK // R)  # all are of the same width
        acc = tl.zeros([BLOCK_N], tl.float32)
        for step in tl.range(0, RANK, BLOCK_R):
            r = step + tl.arange(0, BLOCK_R)[None, :]
            known = inside[:, None] & (r < RANK)
            b = tl.load(b_ptr + place * (N * RANK) + n[:, None] * RANK + r, mask=known, other=0.0)
            inner = tl.load(inner_ptr + row * R + part[:, None] * RANK + r, mask=known, other=0.0)
            acc += tl.sum(b.to(tl.float32) * inner.to(b.dtype).to(tl.float32), axis=1)
        at = y_ptr + row.to(tl.int64) * N + n
        y = tl.load(at, mask=inside, other=0.0)
        tl.store(at, (y.to(tl.float32) + acc).to(y.dtype), mask=inside)


@dataclass(frozen=True, slots=True, eq=False)
class PairFactors:
    """The factors of one linear in every expert, whose parts are of the same width."""

    a: Tensor  # [experts] int64: where each A lies
    b: Tensor  # the same of B
    r: int  # parts * rank
    rank: int

    @classmethod
    def of(cls, weights: Sequence[AdapterWeights]) -> PairFactors:
        """weights: of each expert, which have to stay where they are."""
        first = weights[0]
        a, b = (
            torch.tensor([factor.data_ptr() for factor in factors], dtype=torch.int64, device=first.a.device)
            for factors in ([one.a for one in weights], [one.b for one in weights])
        )
        return cls(a, b, first.a.shape[1], first.rank)


def add_pairs(y: Tensor, x: Tensor, factors: PairFactors, plan: Plan, ids: Tensor, places: Tensor) -> None:
    """y [pairs, n] and what the adapters make of x [pairs, k], both sorted by the plan and contiguous.

    ids int32 [tokens, top_k], places int32 [tokens], contiguous.
    """
    (pairs, n), k, top_k = y.shape, x.shape[1], ids.shape[1]
    inner = x.new_empty(pairs, factors.r, dtype=torch.float32)
    sizes = {"R": factors.r, "E": len(plan.ends), "TOP_K": top_k}
    where = (plan.order, ids, places, plan.ends)
    block_r, block_k = 16, min(128, power_of_two(k))
    _pairs_shrink_kernel[(pairs, -(-factors.r // block_r))](
        x, factors.a, inner, *where, K=k, BLOCK_R=block_r, BLOCK_K=block_k, num_warps=4, **sizes
    )
    block_n = min(256, power_of_two(n))
    _pairs_expand_kernel[(pairs, -(-n // block_n))](
        y, factors.b, inner, *where, N=n, RANK=factors.rank, BLOCK_N=block_n,
        BLOCK_R=min(16, factors.rank), num_warps=4, **sizes,
    )  # fmt: skip

"""Applies adapters of experts to every (token, expert) pair, with multiply-adds instead of matrix products.

`shrink_pairs` computes A x, `gate_pairs` adds B A x to gate and up and activates them, `sum_pairs` adds B A x to down
and sums each token's experts. A program reads the factors of a single pair, so any mix of adapters and experts works.
The time grows with the number of pairs, because pairs with the same factors do not share reads.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.experts.activation import activated, squared_relu
from aengine.kernels.experts.base import ExpertPass
from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.lora.base import AdapterWeights
from aengine.kernels.variants import keep_variants

BLOCK_R = 8
BLOCK_N = 64


@triton.jit
def pair_of(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E: tl.constexpr, TOP_K: tl.constexpr, SORTED: tl.constexpr):
    """Return a row's token, its expert, and the place of its adapter. Without an expert these are -1 and 0."""
    pair = row
    if SORTED:
        pair = tl.load(order_ptr + row, mask=row < tl.load(ends_ptr + E - 1), other=-1)
    expert = tl.load(ids_ptr + pair, mask=pair >= 0, other=-1)
    known = (expert >= 0) & (expert < E)
    token = pair // TOP_K
    place = tl.load(places_ptr + token, mask=known, other=0)
    return token, tl.where(known, expert, -1), place.to(tl.int64)


@keep_variants
@triton.jit
def _shrink_kernel(
    x_ptr,  # OF_TOKENS: [tokens, K], otherwise [rows, K]
    table_ptr,  # [E] int64: the address of each expert's A, [places, R, K] of x's type
    inner_ptr,  # [rows, R] float32
    order_ptr,  # [rows], SORTED only
    ids_ptr,  # [pairs]
    places_ptr,  # [tokens]
    ends_ptr,  # [E], SORTED only
    R: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token, expert, place = pair_of(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E, TOP_K, SORTED)
    if place > 0:
        a_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
        a_rows = (a_ptr + place * (R * K) + tl.minimum(r, R - 1) * K)[:, None]
        x_row = x_ptr + (token if OF_TOKENS else row).to(tl.int64) * K
        k = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
        for step in tl.static_range(0, K, BLOCK_K):
            if K - step >= BLOCK_K:
                a = tl.load(a_rows + step + k[None, :])
                x = tl.load(x_row + step + k)
            else:
                inside = step + k < K
                a = tl.load(a_rows + step + k[None, :], mask=inside[None, :], other=0.0)
                x = tl.load(x_row + step + k, mask=inside, other=0.0)
            acc += a.to(tl.float32) * x.to(tl.float32)[None, :]
        tl.store(inner_ptr + row * R + r, tl.sum(acc, axis=1), mask=r < R)


@triton.jit
def low_rank(b_rows, inner, n, N: tl.constexpr, RANK: tl.constexpr):
    """Return rows n of B times inner, float32 [BLOCK]; 0 for rows from N on.

    b_rows: pointers to the rows [BLOCK]; inner: pointer to RANK numbers.
    """
    BLOCK_R: tl.constexpr = 16 if RANK >= 16 else triton.next_power_of_2(RANK)
    acc = tl.zeros([n.shape[0], BLOCK_R], tl.float32)
    for step in tl.range(0, RANK, BLOCK_R):
        r = step + tl.arange(0, BLOCK_R)
        known = (n < N)[:, None] & (r < RANK)[None, :]
        b = tl.load(b_rows[:, None] + r[None, :], mask=known, other=0.0)
        acc += b.to(tl.float32) * tl.load(inner + r, mask=r < RANK, other=0.0)[None, :]
    return tl.sum(acc, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class PairFactors:
    """The factors of one linear in every expert. All its parts have the same width."""

    a: Tensor  # [experts] int64: the address of each A
    b: Tensor  # [experts] int64: the address of each B
    r: int  # parts * rank
    rank: int

    @classmethod
    def from_weights(cls, weights: Sequence[AdapterWeights]) -> PairFactors:
        """Collect the addresses of each expert's factors. The tensors of `weights` must outlive the result."""
        first = weights[0]
        a, b = (
            torch.tensor([factor.data_ptr() for factor in factors], dtype=torch.int64, device=first.a.device)
            for factors in ([one.a for one in weights], [one.b for one in weights])
        )
        return cls(a, b, first.a.shape[1], first.rank)


def shrink_pairs(
    x: Tensor, factors: PairFactors, one: ExpertPass, ids: Tensor, places: Tensor, *, of_tokens: bool
) -> Tensor:
    """Return A x of every pair, float32 [pairs, r], in the order of `one`'s rows; undefined without an adapter.

    x: [tokens, k] if of_tokens, else [pairs, k]. ids: int32 [tokens, top_k]. places: int32 [tokens]. All contiguous.
    """
    pairs, top_k, k = ids.numel(), ids.shape[1], x.shape[1]
    inner = x.new_empty(pairs, factors.r, dtype=torch.float32)
    block_k = min(1024, power_of_two(k))
    overlap = launch_for(x.device).overlap
    _shrink_kernel[(pairs, -(-factors.r // BLOCK_R))](
        x, factors.a, inner, one.plan.order, ids, places, one.plan.ends,
        R=factors.r, K=k, E=len(one.plan.ends), TOP_K=top_k, OF_TOKENS=of_tokens, SORTED=one.sorted,
        BLOCK_R=BLOCK_R, BLOCK_K=block_k, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return inner


@keep_variants
@triton.jit
def _gated_kernel(
    y_ptr,  # [rows, PARTS * N]: gate, then up; without GATED up alone
    table_ptr,  # [E] int64: the address of each expert's B, [places, PARTS * N, RANK] of y's type
    inner_ptr,  # [rows, PARTS * RANK] float32
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
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GELU: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = 2 if GATED else 1
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    _, expert, place = pair_of(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E, TOP_K, SORTED)
    if expert >= 0:
        y_at = y_ptr + row.to(tl.int64) * (PARTS * N) + n
        gate = tl.load(y_at, mask=n < N, other=0.0).to(tl.float32)
        if GATED:
            up = tl.load(y_at + N, mask=n < N, other=0.0).to(tl.float32)
        if place > 0:
            b_ptr = tl.load(table_ptr + expert).to(tl.pointer_type(y_ptr.dtype.element_ty))
            b_rows = b_ptr + place * (PARTS * N * RANK) + n * RANK
            inner = inner_ptr + row.to(tl.int64) * (PARTS * RANK)
            gate += low_rank(b_rows, inner, n, N, RANK)
            if GATED:
                up += low_rank(b_rows + N * RANK, inner + RANK, n, N, RANK)
        result = activated(gate, up, ALPHA, LIMIT, GELU) if GATED else squared_relu(gate)
        tl.store(out_ptr + row.to(tl.int64) * N + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


def gate_pairs(
    y: Tensor, inner: Tensor, factors: PairFactors, rule: ExpertRule, one: ExpertPass, ids: Tensor, places: Tensor
) -> Tensor:
    """Add B inner to gate and up of every pair, and return their activation by `rule`, [pairs, n].

    A program computes some columns of gate, and the same columns of up, of one pair. Without a gate there is only up.

    Args:
        y: [pairs, parts * n], gate first, in the order of `one`'s rows.
        inner: [pairs, parts * rank], from `shrink_pairs`.
        ids: int32 [tokens, top_k].
        places: int32 [tokens].
    """
    pairs, n, top_k = len(y), y.shape[1] // rule.parts, ids.shape[1]
    out = y.new_empty(pairs, n)
    overlap = launch_for(y.device).overlap
    alpha, limit = (0.0, 0.0) if rule.clamp is None else (rule.clamp.alpha, rule.clamp.limit)
    _gated_kernel[(pairs, -(-n // BLOCK_N))](
        y, factors.b, inner, out, one.plan.order, ids, places, one.plan.ends,
        N=n, RANK=factors.rank, E=len(one.plan.ends), TOP_K=top_k, SORTED=one.sorted, BLOCK_N=BLOCK_N,
        GATED=rule.gated, ALPHA=alpha, LIMIT=limit, GELU=rule.gelu, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


@keep_variants
@triton.jit
def _sum_kernel(
    rows_ptr,  # [rows, N]
    table_ptr,  # [E] int64: the address of each expert's B, [places, N, RANK] of the rows' type
    inner_ptr,  # [rows, RANK] float32
    ids_ptr,  # [pairs]
    weights_ptr,  # [pairs]
    places_ptr,  # [tokens]
    row_of_ptr,  # [pairs], SORTED only; else row and pair have the same number
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
    rows: Tensor, inner: Tensor, factors: PairFactors, one: ExpertPass, ids: Tensor, weights: Tensor, places: Tensor,
    residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """Add the weighted sum of each token's rows plus B inner to the residual. Returns [tokens, n].

    A program computes some columns of one token. All tensors are contiguous.

    Args:
        rows: [pairs, n].
        inner: [pairs, rank], from `shrink_pairs`.
        ids, weights: int32 and float32 [tokens, top_k].
        places: int32 [tokens].
        residual: [tokens, n], overwritten by the result. None: zeros, in new memory.
    """
    (tokens, top_k), n = ids.shape, rows.shape[1]
    out = rows.new_empty(tokens, n) if residual is None else residual
    overlap = launch_for(rows.device).overlap
    _sum_kernel[(tokens, -(-n // BLOCK_N))](
        rows, factors.b, inner, ids, weights, places, one.plan.places, out, out,
        N=n, RANK=factors.rank, E=len(one.plan.ends), TOP_K=top_k, SORTED=one.sorted, BLOCK_N=BLOCK_N,
        ADD=residual is not None, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out

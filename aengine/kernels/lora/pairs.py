"""The first factors of the adapters of experts, A x of every (token, expert) pair, with plain multiply-adds.

A program reads some rows of A for a single pair: right for any mix of adapters and experts, and as slow as all these
bytes.
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

from aengine.kernels.experts.apart import Apart
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.lora.base import AdapterWeights
from aengine.kernels.variants import keep_variants

BLOCK_R = 8


@triton.jit
def pair_of(row, order_ptr, ids_ptr, places_ptr, ends_ptr, E: tl.constexpr, TOP_K: tl.constexpr, SORTED: tl.constexpr):
    """Of a row its token, expert and the place of its adapter, 0 for none; where the expert is none, -1 and 0."""
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
    table_ptr,  # [E] int64: where each expert's A lies, [places, R, K] of x's type
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
    """B inner of some rows of B: b_rows points to them [BLOCK], inner to RANK numbers -> float32 [BLOCK].

    n: which rows they are; beyond N: 0.
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


def shrink_pairs(
    x: Tensor, factors: PairFactors, apart: Apart, ids: Tensor, places: Tensor, *, of_tokens: bool
) -> Tensor:
    """A x of every pair, float32 [pairs, r], in the order of `apart`'s rows; undefined where there is no adapter.

    x [tokens, k] where it is of tokens, else [pairs, k]; ids int32 [tokens, top_k], places int32 [tokens]; contiguous.
    """
    pairs, top_k, k = ids.numel(), ids.shape[1], x.shape[1]
    inner = x.new_empty(pairs, factors.r, dtype=torch.float32)
    block_k = min(1024, power_of_two(k))
    overlap = launch_for(x.device).overlap
    _shrink_kernel[(pairs, -(-factors.r // BLOCK_R))](
        x, factors.a, inner, apart.plan.order, ids, places, apart.plan.ends,
        R=factors.r, K=k, E=len(apart.plan.ends), TOP_K=top_k, OF_TOKENS=of_tokens, SORTED=apart.sorted,
        BLOCK_R=BLOCK_R, BLOCK_K=block_k, OVERLAP=overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return inner

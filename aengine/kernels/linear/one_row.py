"""x @ weight.T for a single row: the weight is read once, by plain multiply-adds.

The kernel also norms the row, adds its adapter, and adds a residual. A program owns some rows of the weight. It loads
their first columns, or all of them, before it waits for the kernel that makes x.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.columns import evens, fold, in_words, load_columns, odds, products
from aengine.kernels.linear.low_rank import LowRank, load_b_row, low_rank_row
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def _one_row_kernel(
    x_ptr,  # [K]
    w_ptr,  # [N, K]
    bias_ptr,  # [N], BIAS only
    residual_ptr,  # [N], ADD only; may be out_ptr
    norm_ptr,  # [K], NORM only
    out_ptr,  # [N]
    inner_ptr,  # [SPLITS, R] float32; this and the next three are for RANK only
    b_ptr,  # [places, N, RANK]
    parts_ptr,  # [N] int8
    place_ptr,  # [1]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,  # blocks of columns that are loaded before the wait
    STAGES: tl.constexpr,
    WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
    RANK: tl.constexpr = 0,  # of adapters; 0: there are none
    R: tl.constexpr = 0,
    SPLITS: tl.constexpr = 1,
):
    PARTS: tl.constexpr = BLOCK_K // 8
    WHOLE: tl.constexpr = K % BLOCK_K == 0
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows after the end read the last row and are not stored.
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    x_row = x_ptr + tl.arange(0, 1)[:, None]
    norm_row = norm_ptr + tl.arange(0, 1)[:, None]
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: they are loaded while the kernel before this one ends, and are used last.
    early, early_norm = (), ()
    for step in tl.static_range(EARLY):
        early = early + (load_columns(w_rows, step * BLOCK_K, BLOCK_K, K, WHOLE, WORDS),)  # noqa: RUF005 (Triton knows no other way)
        if NORM:
            early_norm = early_norm + (load_columns(norm_row, step * BLOCK_K, BLOCK_K, K, WHOLE, WORDS),)  # noqa: RUF005
    if RANK:
        place = tl.load(place_ptr)
        parts = tl.load(parts_ptr + tl.minimum(n, N - 1)).to(tl.int32)
        b = load_b_row(b_ptr, place, n, N, RANK)
    if OVERLAP:
        gdc_wait()
    if RANK:
        added = low_rank_row(b, inner_ptr, parts, R, RANK, SPLITS)
    if ADD:  # it is loaded while the weights stream
        residual = tl.load(residual_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_N, PARTS], tl.float32)
    squares = tl.zeros([1, PARTS], tl.float32)
    for at in tl.range(EARLY * BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        w = load_columns(w_rows, at, BLOCK_K, K, WHOLE, WORDS)
        x = load_columns(x_row, at, BLOCK_K, K, WHOLE, WORDS)
        norm = load_columns(norm_row, at, BLOCK_K, K, WHOLE, WORDS) if NORM else x
        acc, squares = _add(acc, squares, w, x, norm, PARTS, NORM)
    for step in tl.static_range(EARLY):
        x = load_columns(x_row, step * BLOCK_K, BLOCK_K, K, WHOLE, WORDS)
        acc, squares = _add(acc, squares, early[step], x, early_norm[step] if NORM else x, PARTS, NORM)
    result = tl.sum(acc, axis=1)
    if RANK:
        result += added
    if NORM:
        result *= tl.math.rsqrt(tl.sum(squares) / K + eps)
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    if ADD:
        result += residual
    tl.store(out_ptr + n, result.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _add(acc, squares, w, x, norm, PARTS: tl.constexpr, NORM: tl.constexpr):
    """Add the products of some columns to acc [BLOCK_N, PARTS], and the squares of x to squares [1, PARTS]."""
    x_evens, x_odds = evens(x), odds(x)
    if NORM:
        squares += fold(x_evens * x_evens + x_odds * x_odds, PARTS)
        x_evens *= evens(norm)
        x_odds *= odds(norm)
    return acc + products(w, x_evens, x_odds, PARTS), squares


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    """How one shape is divided. early: columns that are loaded before the wait, in whole blocks."""

    block_n: int
    block_k: int
    stages: int
    warps: int
    early: int

    def shared_memory(self, m: int, element_size: int) -> int:
        """Return an upper bound in bytes: copies in flight and a few sums. m is 1."""
        return self.stages * (self.block_n + 2) * self.block_k * element_size + 1024


def one_row(
    x: Tensor,
    weight: Tensor,
    config: OneRowConfig,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    norm: Norm | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """x [1, k], weight [n, k], bias [n], all contiguous -> [1, n].

    Args:
        residual: [1, n], contiguous. It is added, and becomes the result.
        low_rank: of one row; with a norm, of x times the norm's weight, because this kernel does the rest of the norm.
    """
    n, k = weight.shape
    overlap, early = launch_for(x.device).overlap, min(config.early, k)
    out = x.new_empty(1, n) if residual is None else residual
    _one_row_kernel[(-(-n // config.block_n),)](
        x, weight, x if bias is None else bias, out, x if norm is None else norm.weight, out,
        *_tensors(low_rank, x), 0.0 if norm is None else norm.eps,
        N=n, K=k, BLOCK_N=config.block_n, BLOCK_K=config.block_k, EARLY=-(-early // config.block_k),
        STAGES=config.stages, WORDS=in_words(x, weight), BIAS=bias is not None, ADD=residual is not None,
        NORM=norm is not None, OVERLAP=overlap, num_warps=config.warps, launch_pdl=overlap, **_sizes(low_rank),
    )  # fmt: skip
    return out


def _tensors(low_rank: LowRank | None, absent: Tensor) -> tuple[Tensor, ...]:
    if low_rank is None:
        return (absent,) * 4
    return low_rank.inner, low_rank.b, low_rank.parts, low_rank.places


def _sizes(low_rank: LowRank | None) -> dict[str, int]:
    if low_rank is None:
        return {"RANK": 0, "R": 0, "SPLITS": 1}
    return {"RANK": low_rank.rank, "R": low_rank.inner.shape[-1], "SPLITS": len(low_rank.inner)}

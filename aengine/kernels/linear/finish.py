"""The end of a product: pieces of K are added up, then the bias and the residual, and the result is stored."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from aengine.kernels.parts import is_last, sum_parts


@triton.jit
def finish(
    result, bias_ptr, residual_ptr, out_ptr, parts, arrived_ptr, used, rows, n, tile, split, splits,
    N: tl.constexpr, SPLIT: tl.constexpr, UNROLLED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store a result [M, BLOCK_N], or its part of one: then the last of `splits` programs stores the sum of the parts.

    parts: pointers [M, BLOCK_N] to the tile's first part, which the others follow; used [M, 1]: the rows that exist;
    rows [M]: their places in `out`; n [BLOCK_N]: outputs; tile: its counter's number; SPLIT: whether any tile is split;
    UNROLLED: as for `sum_parts`.
    """
    if not SPLIT:
        store_result(result, bias_ptr, residual_ptr, out_ptr, used, rows, n, N, BIAS, ADD)
    elif splits > 1:
        size: tl.constexpr = result.shape[0] * result.shape[1]
        tl.store(parts + split * size, result, mask=used)
        if is_last(arrived_ptr + tile, splits):
            whole = sum_parts(parts, size, splits, used, UNROLLED)
            store_result(whole, bias_ptr, residual_ptr, out_ptr, used, rows, n, N, BIAS, ADD)
    else:
        store_result(result, bias_ptr, residual_ptr, out_ptr, used, rows, n, N, BIAS, ADD)


@triton.jit
def store_result(
    result, bias_ptr, residual_ptr, out_ptr, used, rows, n, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    """Store a result [M, BLOCK_N] with bias [N] and residual [m, N]; arguments as for `finish`."""
    inside = used & (n < N)[None, :]
    at = (rows * N)[:, None] + n[None, :]
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        result += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)

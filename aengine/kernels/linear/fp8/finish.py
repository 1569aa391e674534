"""The end of products of few rows or few tiles: bias, residual, and the sum of the pieces of K in their order."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    result, bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, m, n, m0, row, tile, split,
    N: tl.constexpr, M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores result [M, BLOCK_N], rows from m0 on; where K is split, the last to arrive adds all parts up in order."""
    used = (m0 + row < m)[:, None]
    if SPLITS == 1:
        _store(result, bias_ptr, residual_ptr, out_ptr, used, n, m0 + row, N, BIAS, ADD)
    else:
        size: tl.constexpr = M * BLOCK_N
        parts = part_ptr + tile * (SPLITS * size) + row[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(parts + split * size, result, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLITS):
                # Other processors wrote these: read past the first-level cache.
                whole += tl.load(parts + other * size, mask=used, other=0.0, cache_modifier=".cg")
            _store(whole, bias_ptr, residual_ptr, out_ptr, used, n, m0 + row, N, BIAS, ADD)


@triton.jit
def _store(
    result, bias_ptr, residual_ptr, out_ptr, used, n, row, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    inside = used & (n < N)[None, :]
    at = (row * N)[:, None] + n[None, :]
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        result += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)

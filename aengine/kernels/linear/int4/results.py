"""How sums become results: at once, or added up in order by the last of several programs that have a part."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    result, bias_ptr, residual_ptr, out_ptr, part_ptr, arrived_ptr, m, n, rows_m, tile, split, splits,
    M: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores a result [M, BLOCK_N], or adds it to those of the other pieces, in order, where it comes last.

    SPLIT: whether there may be others; tile: among those that are split.
    """
    if not SPLIT:
        write(result, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)
    elif splits > 1:
        size: tl.constexpr = M * BLOCK_N
        used = (rows_m < m)[:, None]
        inner = tl.arange(0, M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        parts = part_ptr + tile * (splits * size) + inner
        tl.store(parts + split * size, result, mask=used)
        tl.debug_barrier()  # every thread's part is stored before one of them announces it
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == splits - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)
            whole = tl.zeros([M, BLOCK_N], tl.float32)
            for other in range(splits):
                # Other processors wrote these: read past the first-level cache.
                whole += tl.load(parts + other * size, mask=used, other=0.0, cache_modifier=".cg")
            write(whole, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)
    else:
        write(result, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N, BIAS, ADD)


@triton.jit
def write(
    result, bias_ptr, residual_ptr, out_ptr, m, n, rows_m, N: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr
):
    inside = (rows_m < m)[:, None] & (n < N)[None, :]
    offsets = rows_m.to(tl.int64)[:, None] * N + n[None, :]
    if BIAS:
        result += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADD:
        result += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + offsets, result.to(out_ptr.dtype.element_ty), mask=inside)

"""x @ weight.T for one row and a weight in FP8, multiplied and added up in float32 by plain instructions.

A thread holds 16 neighbouring columns of each of its rows in registers, as memory delivers them. It loads the next ones
while it multiplies these. The 16 products are added up before they are multiplied by the scale of their 128 columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.linear.finish import store_result
from aengine.kernels.variants import keep_variants


@keep_variants
@triton.jit
def one_row_kernel(
    x_ptr,  # [1, K]
    w_ptr,  # [N, K] e4m3
    scale_ptr,  # [ceil(N / SCALE_ROWS), groups], or one scale for all groups if not GROUPED
    bias_ptr,  # [N]
    residual_ptr,  # [1, N], ADD only; may be out_ptr
    norm_ptr,  # [K], NORM only
    out_ptr,  # [1, N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,  # groups of 128 columns in a step
    AHEAD: tl.constexpr,  # steps whose weights are in flight: one or two
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    GROUPS: tl.constexpr = (K + 127) // 128
    CHUNKS: tl.constexpr = GROUPS * 8  # of 16 columns; so is everything below
    STEP: tl.constexpr = WIDTH * 8
    tile = tl.program_id(0)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(n, N - 1)  # rows after the end read the last row and are not stored
    chunk = tl.arange(0, STEP)
    # Chunks are the first axis, so that neighbouring threads have neighbouring chunks.
    w_at = (w_ptr + rows.to(tl.int64) * K)[None, :, None] + (chunk * 16)[:, None, None] + tl.arange(0, 16)
    x_at = (chunk * 16)[:, None, None] + tl.arange(0, 8)
    if SCALE_ROWS % BLOCK_N == 0:
        scale_at = scale_ptr + tile * BLOCK_N // SCALE_ROWS * GROUPS + tl.zeros([STEP, 1], tl.int32)
    else:
        scale_at = scale_ptr + (rows // SCALE_ROWS * GROUPS)[None, :] + tl.zeros([STEP, 1], tl.int32)
    if OVERLAP:
        gdc_launch_dependents()
    # Weights need not wait: they are loaded while the kernel before this one ends.
    w = tl.load(w_at, mask=(chunk < K // 16)[:, None, None], other=0.0)  # [STEP, BLOCK_N, 16]
    later = w
    if AHEAD > 1:
        later = tl.load(w_at + STEP * 16, mask=(chunk + STEP < K // 16)[:, None, None], other=0.0)
    if OVERLAP:
        gdc_wait()
    acc = tl.zeros([STEP, BLOCK_N], tl.float32)
    squares = tl.zeros([STEP, 1], tl.float32)
    for step in tl.static_range(0, CHUNKS, STEP):  # unrolled, because a loop would unpack the bytes that it carries
        newest = w
        if step + AHEAD * STEP < CHUNKS:
            at = step + AHEAD * STEP
            newest = tl.load(w_at + at * 16, mask=(chunk + at < K // 16)[:, None, None], other=0.0)
        acc, squares = _add_products(
            acc, squares, w, x_ptr + x_at, norm_ptr + x_at, scale_at, step, chunk, K, BLOCK_N, STEP, GROUPED, NORM,
        )  # fmt: skip
        w = newest if AHEAD == 1 else later
        later = newest
    result = tl.sum(acc, axis=0)[None, :]  # [1, BLOCK_N]
    if not GROUPED:
        result *= tl.load(scale_ptr + rows // SCALE_ROWS)[None, :]
    if NORM:
        result *= tl.math.rsqrt(tl.sum(tl.reshape(squares, [STEP])) / K + eps)
    row = tl.arange(0, 1)
    store_result(result, bias_ptr, residual_ptr, out_ptr, (row < 1)[:, None], row, n, N, BIAS, ADD)


@triton.jit
def _add_products(
    acc, squares, w, x_at, norm_at, scale_at, step, chunk,
    K: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr, GROUPED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Add a chunk's products to acc [STEP, BLOCK_N], and x's squares to squares [STEP, 1]."""
    inside = chunk + step < K // 16
    # The halves of a chunk are split, because one load of x brings 8 columns.
    low, high = tl.split(tl.permute(tl.reshape(w, [STEP, BLOCK_N, 2, 8]), [0, 1, 3, 2]))
    part = tl.zeros([STEP, BLOCK_N], tl.float32)
    for half in tl.static_range(2):
        at = step * 16 + half * 8
        x = tl.load(x_at + at, mask=inside[:, None, None], other=0.0).to(tl.float32)  # [STEP, 1, 8]
        if NORM:
            squares += tl.sum(x * x, axis=2)
            x *= tl.load(norm_at + at, mask=inside[:, None, None], other=0.0).to(tl.float32)
        part += tl.sum((low if half == 0 else high).to(tl.float32) * x, axis=2)
    if GROUPED:
        part *= tl.load(scale_at + ((chunk + step) // 8)[:, None], mask=inside[:, None], other=0.0)
    return acc + part, squares


@dataclass(frozen=True, slots=True)
class OneRowConfig:
    """How one shape is divided.

    width: groups of 128 columns in a step, a power of two; 4 groups are 16 bytes for each thread of a warp. ahead:
    steps whose weights are in flight, one or two.
    """

    block_n: int
    warps: int
    width: int
    ahead: int = 1

    def shared_memory(self, m: int, element_size: int) -> int:
        """Return an upper bound in bytes of the sums that move between warps."""
        return self.block_n * self.width * 32 + 4096

"""A product of few tiles and long rows in pieces of k: cuBLAS multiplies them side by side, one launch adds them up.

A tile's groups of columns follow one another, so what takes its time is k, while half of the processors are idle. The
library does not batch what has blocks of scales, so each piece goes on a stream of its own.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.variants import keep_variants

_BLOCK = 2048


class Pieces:
    """The scales of a weight [n, k] that is read in `count` pieces of k at once."""

    def __init__(self, scale: Tensor, count: int, products: BlockProducts) -> None:
        """scale [n / 128, k / 128]: count divides the groups."""
        self.count = count
        self._scales = [F.pad(piece, (0, -piece.shape[1] % 4)).contiguous() for piece in scale.chunk(count, 1)]
        self._products = products

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"scales": self._scales}

    def __call__(self, x: Tensor, x_scale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """x [m, k] e4m3 with scales [k / 128, m], weight [n, k] -> [count, m, n] of `dtype`, to be added up.

        None, and nothing done, where the library does not take it.
        """
        parts = x.new_empty(self.count, len(x), len(weight), dtype=dtype)
        if x.is_meta:
            return parts
        xs, weights = x.chunk(self.count, 1), weight.chunk(self.count, 1)
        product = self._products(weights[0], dtype, bias=False)
        if product is None:
            return None
        pieces = list(zip(xs, x_scale.chunk(self.count), weights, self._scales, parts))
        current, sides = torch.cuda.current_stream(x.device), self._products.sides(x.device, self.count - 1)
        for side in sides:
            side.begins.record(current)
        if not product(*pieces[0]):
            return None
        for side, piece in zip(sides, pieces[1:]):
            side.stream.wait_event(side.begins)
            product(*piece, stream=side.stream)
            side.ends.record(side.stream)
            current.wait_event(side.ends)
        return parts


@keep_variants
@triton.jit(do_not_specialize=["m", "rows"])
def _add_up_kernel(
    part_ptr,  # [PIECES, m, N]
    residual_ptr,  # [rows, N], ADD only; may be out_ptr
    out_ptr,  # [rows, N]
    m,
    rows,
    N: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * N
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    whole = tl.zeros([BLOCK], tl.float32)
    if ADD:
        whole += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    for piece in tl.static_range(PIECES):
        whole += tl.load(part_ptr + piece * (m * N) + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, whole.to(out_ptr.dtype.element_ty), mask=inside)


def add_up(parts: Tensor, residual: Tensor | None, rows: int) -> Tensor:
    """parts [pieces, m, n], of which the first `rows` of m mean something -> their sum [rows, n], rounded at its end.

    residual [rows, n], contiguous, is added and used up.
    """
    pieces, m, n = parts.shape
    out = parts.new_empty(rows, n) if residual is None else residual
    overlap = launch_for(parts.device).overlap
    _add_up_kernel[(triton.cdiv(rows * n, _BLOCK),)](
        parts, out, out, m, rows, N=n, PIECES=pieces, BLOCK=_BLOCK, ADD=residual is not None, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out

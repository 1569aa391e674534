"""cuBLAS on FP8: groups of 128 by blocks of 128 x 128, or tokens by channels, on Hopper alone.

A product of few tiles and long rows is multiplied in pieces of k, side by side, and one launch adds them up. A tile
computes its groups of columns one after the other, so its time grows with k while half of the processors idle. The
library does not batch products with blocks of scales, so each piece has its own stream.
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
from aengine.kernels.linear.fp8.config import pieces_of_k
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.weights.fp8 import Fp8Weight
from aengine.kernels.variants import keep_variants

_BLOCK = 2048  # elements that a program adds up


class Pieces:
    """The scales of a weight [n, k] that is multiplied in `count` pieces of k at once."""

    def __init__(self, scale: Tensor, count: int, products: BlockProducts) -> None:
        """scale: [n / 128, k / 128]. count divides the groups."""
        self.count = count
        self._scales = [F.pad(piece, (0, -piece.shape[1] % 4)).contiguous() for piece in scale.chunk(count, 1)]
        self._products = products

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"scales": self._scales}

    def __call__(self, x: Tensor, x_scale: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """x [m, k] e4m3 with scales [k / 128, m], weight [n, k] -> [count, m, n] of `dtype`, to be added up.

        Returns None, and does nothing, if the library does not take it.
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
    """parts [pieces, m, n] -> the sum [rows, n] of the first rows, rounded once.

    residual [rows, n], contiguous, is added and becomes the result.
    """
    pieces, m, n = parts.shape
    out = parts.new_empty(rows, n) if residual is None else residual
    overlap = launch_for(parts.device).overlap
    _add_up_kernel[(triton.cdiv(rows * n, _BLOCK),)](
        parts, out, out, m, rows, N=n, PIECES=pieces, BLOCK=_BLOCK, ADD=residual is not None, OVERLAP=overlap,
        num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
    return out


class LibraryFp8:
    """A weight as cuBLAS reads it: scales in float32, padded along k to a multiple of four."""

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, products: BlockProducts) -> None:
        self._weight = weight.weight
        self._bias = bias
        self._grouped = weight.activations == "group"
        scale = weight.scale
        self._scale = F.pad(scale, (0, -scale.shape[1] % 4)).contiguous() if self._grouped else scale.view(1, -1)
        self._products = products
        counts = {self._pieces_of_k(rows) for rows in (128, 256)} - {1}
        self._pieces = [Pieces(scale, count, products) for count in sorted(counts)]

    @property
    def parameters(self) -> Mapping[str, object]:
        """Leave out the weight and its bias, which the linear registers."""
        return {"scale": self._scale, "pieces": self._pieces}

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Return whether cuBLAS knows this kind of scales on this device."""
        n, k = weight.weight.shape
        if n % 16 or k % 16 or launch_for(weight.weight.device).capability[0] != 9:
            return False
        if weight.activations == "group":
            return weight.block == (GROUP, GROUP)
        return weight.activations == "token" and weight.block[0] == 1 and weight.block[1] >= k

    def multiple(self, m: int) -> int:
        """Return what the number of rows is padded to: 4 is needed. With groups, 129 to 255 rows take longer than
        256.
        """
        return 256 if self._grouped and 128 < m < 256 else 4

    def cuts(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether this number of rows is multiplied in pieces of k. dtype: of the outputs."""
        return self._cut(rows, dtype) is not None

    def _cut(self, rows: int, dtype: torch.dtype) -> Pieces | None:
        count = self._pieces_of_k(rows)
        if count == 1 or not self._products.takes(self._weight.device, dtype):
            return None
        return next(pieces for pieces in self._pieces if pieces.count == count)

    def _pieces_of_k(self, rows: int) -> int:
        if not self._grouped or self._bias is not None:
            return 1
        return pieces_of_k(rows, *self._weight.shape, launch_for(self._weight.device))

    def __call__(self, x: Tensor, x_scale: Tensor, residual: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
        """x [m, k] e4m3, m a multiple of four, with its scales as `round_inputs` gives them -> [rows, n] of `dtype`.

        Rows from `rows` on are padding. residual [rows, n] of `dtype`, contiguous, is added and may be overwritten.
        """
        pieces = self._cut(rows, dtype)
        parts = None if pieces is None else pieces(x, x_scale, self._weight, dtype)
        if parts is not None:
            return add_up(parts, residual, rows)
        return self._whole(x, x_scale, residual, rows, dtype)

    def _whole(self, x: Tensor, x_scale: Tensor, residual: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
        m, n = len(x), len(self._weight)
        if x.is_meta:  # torch has no shape function for this product
            return x.new_empty(rows, n, dtype=dtype)
        product = self._products(self._weight, dtype, bias=self._bias is not None) if self._grouped else None
        if product is not None:
            add = residual is not None and rows == m
            out = residual if residual is not None and add else x.new_empty(m, n, dtype=dtype)
            if product(x, x_scale, self._weight, self._scale, out, self._bias, add=add):
                return out[:rows] if residual is None or add else residual.add_(out[:rows])
        out = self._by_torch(x, x_scale, dtype)[:rows]
        return out if residual is None else residual.add_(out)

    def _by_torch(self, x: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
        if self._grouped:
            recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
            scales = x_scale.t(), self._scale.t()  # the second one is [groups, n / 128], strides (1, groups)
        else:
            recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
            scales = x_scale[:, None], self._scale
        out: Tensor = F.scaled_mm(
            x, self._weight.t(), scales[0], recipes[0], scales[1], recipes[1], bias=self._bias, output_dtype=dtype
        )
        return out

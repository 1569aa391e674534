"""A linear whose weight stays in FP8 on a CUDA device, from compute capability 8.9 on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.fp8.config import few_rows_config, few_tiles_config, many_rows_config, rounded_rows_config
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.few_rows import MAX_ROWS, Fp8FewRows
from aengine.kernels.linear.fp8.few_tiles import few_tiles
from aengine.kernels.linear.fp8.inputs import round_inputs
from aengine.kernels.linear.fp8.library import LibraryFp8
from aengine.kernels.linear.fp8.many_rows import many_rows
from aengine.kernels.linear.fp8.one_row import OneRowConfig
from aengine.kernels.linear.fp8.quantize import GROUP, kernel_scales
from aengine.kernels.linear.weights.fp8 import Fp8Weight


class Fp8Linear:
    """One row is not rounded to FP8, nor are up to 64 if inputs have no scales for groups of columns. More rows are
    rounded as the format says.

    Everything is enqueued on the current stream, or on another stream that waits for it. Use one stream at a time.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, few_rows: Fp8FewRows, products: BlockProducts) -> None:
        """bias: [outputs]. few_rows, products: shared by all linears of a model.

        Raises ValueError if the weight does not fit; see `fits`.
        """
        if not self.fits(weight):
            raise ValueError(f"an FP8 weight {list(weight.weight.shape)} has no kernel; use it dequantised")
        self.outputs, self.inputs = weight.weight.shape
        self._weight = weight.weight
        self._scales = kernel_scales(weight)
        self._activations = weight.activations
        self._input_scale = weight.input_scale
        self._bias = bias
        self._few_rows = few_rows
        self._library = LibraryFp8(weight, bias, products) if LibraryFp8.fits(weight) else None
        grouped = weight.activations == "group"
        self._library_of_groups = self._library is not None and grouped
        self._unrounded_rows = 1 if grouped else MAX_ROWS
        self._rounded_few_rows = MAX_ROWS if grouped else 0

    @property
    def parameters(self) -> Mapping[str, object]:
        return {
            "weight": self._weight,
            "scales": self._scales,
            "activations": self._activations,
            "input_scale": self._input_scale,
            "bias": self._bias,
            "library": self._library,
        }

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Return whether the kernels can read it: rows begin at multiples of 16 bytes, blocks at multiples of 128."""
        k, columns = weight.weight.shape[1], weight.block[1]
        return weight.weight.is_contiguous() and k % 16 == 0 and (columns >= k or columns % GROUP == 0)

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if norm is not None and not norm.is_rms:
            x, norm = norm(x), None
        m, n, k, launch = len(x), self.outputs, self.inputs, launch_for(x.device)
        if 1 <= m <= self._unrounded_rows:
            config = few_rows_config(m, n, k, x.element_size(), launch)
            if config is not None:
                x = silu_mul(x) if gated else x.contiguous()
                # A longer norm delays the stream of weights by more than its own launch takes.
                if norm is not None and not (isinstance(config, OneRowConfig) and config.width * GROUP >= k):
                    x, norm = norm(x), None
                return self._few_rows(x, self._weight, self._scales, config, self._bias, residual=residual, norm=norm)
        library = self._library if m > MAX_ROWS else None
        tiles = None
        if self._library_of_groups and (library is None or not library.cuts(m, x.dtype)):
            tiles = few_tiles_config(m, n, k, launch)
        if tiles is not None:
            library = None
        multiple = library.multiple(m) if library else 1
        rounded, scale = round_inputs(x, self._activations, self._input_scale, norm=norm, silu=gated, multiple=multiple)
        if library is not None:
            return library(rounded, scale, residual, m, x.dtype)
        if tiles is not None:
            return few_tiles(
                rounded, scale, self._weight, self._scales.scale, tiles, self._few_rows.parts, bias=self._bias,
                residual=residual, dtype=x.dtype,
            )  # fmt: skip
        if m <= self._rounded_few_rows:
            few = rounded_rows_config(m, n, k, launch)
            if few is not None:
                return self._few_rows(
                    rounded, self._weight, self._scales, few, self._bias, x_scale=scale, residual=residual,
                    dtype=x.dtype,
                )  # fmt: skip
        return many_rows(
            rounded, scale, self._activations, self._weight, self._scales, many_rows_config(m, n, launch),
            bias=self._bias, residual=residual, dtype=x.dtype,
        )  # fmt: skip

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> None:
        return None

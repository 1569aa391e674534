"""A linear whose weight stays in FP8 on a CUDA device, from compute capability 8.9 on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.fp8.config import few_rows_config, few_tiles_config, many_rows_config, rounded_rows_config
from aengine.kernels.linear.fp8.cublas_lt import BlockProducts
from aengine.kernels.linear.fp8.few_rows import MAX_ROWS, FewRowsConfig, FewRowsOptions, Fp8FewRows
from aengine.kernels.linear.fp8.few_tiles import few_tiles
from aengine.kernels.linear.fp8.inputs import round_inputs
from aengine.kernels.linear.fp8.library import LibraryFp8
from aengine.kernels.linear.fp8.many_rows import many_rows
from aengine.kernels.linear.fp8.one_row import OneRowConfig
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.fp8.scales import kernel_scales
from aengine.kernels.linear.weights import Fp8Weight


class Fp8Linear:
    """One row stays in its own type, which is nearer to the truth than FP8, and so do up to 64 where inputs have no
    scales for groups of columns; more are rounded as the format says.

    Everything is enqueued on the current stream, or beside it where that waits for it; one stream at a time.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, few_rows: Fp8FewRows, products: BlockProducts) -> None:
        """bias [outputs]; few_rows, products: shared by all linears of a model. ValueError: see `fits`."""
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
        self._blocks = self._library is not None and weight.activations == "group"

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
        """Whether the kernels can read it: rows must begin at multiples of 16 bytes, blocks at multiples of 128."""
        k, columns = weight.weight.shape[1], weight.block[1]
        return weight.weight.is_contiguous() and k % 16 == 0 and (columns >= k or columns % GROUP == 0)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._product(x, residual)

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self._product(x, norm=norm)

    def activated(self, norm: Norm | None, x: Tensor) -> None:
        return None

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self._product(gate_up, residual, silu=True)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self._product(gate_up, silu=True)

    def _product(
        self, x: Tensor, residual: Tensor | None = None, norm: Norm | None = None, silu: bool = False
    ) -> Tensor:
        """x [m, inputs], or [m, 2 * inputs] with silu -> [m, outputs]; norm or SiLU come first, the residual last."""
        m, launch = len(x), launch_for(x.device)
        if m == 1 or (m <= MAX_ROWS and self._activations != "group"):
            config = few_rows_config(m, self.outputs, self.inputs, x.element_size(), launch)
            if config is not None:
                return self._unrounded(x, config, residual, norm, silu)
        library = self._library if m > MAX_ROWS else None
        cut = library is not None and library.cuts(m, x.dtype)
        tiles = few_tiles_config(m, self.outputs, self.inputs, launch) if self._blocks and not cut else None
        if tiles is not None:
            library = None
        multiple = library.multiple(m) if library else 1
        rounded, scale = round_inputs(x, self._activations, self._input_scale, norm=norm, silu=silu, multiple=multiple)
        if library is not None:
            return library(rounded, scale, residual, m, x.dtype)
        if tiles is not None:
            return few_tiles(
                rounded, scale, self._weight, self._scales.scale, tiles, self._few_rows.parts, bias=self._bias,
                residual=residual, out=residual, dtype=x.dtype,
            )  # fmt: skip
        if m <= MAX_ROWS and self._activations == "group":
            few = rounded_rows_config(m, self.outputs, self.inputs, launch)
            if few is not None:
                options = FewRowsOptions(x_scale=scale, residual=residual, out=residual, dtype=x.dtype)
                return self._few_rows(rounded, self._weight, self._scales, few, self._bias, options)
        return many_rows(
            rounded, scale, self._activations, self._weight, self._scales, many_rows_config(m, self.outputs, launch),
            bias=self._bias, residual=residual, out=residual, dtype=x.dtype,
        )  # fmt: skip

    def _unrounded(
        self,
        x: Tensor,
        config: FewRowsConfig | OneRowConfig,
        residual: Tensor | None,
        norm: Norm | None,
        silu: bool,
    ) -> Tensor:
        x = silu_mul(x) if silu else x.contiguous()
        # Where x is longer, the norm holds up the stream of weights by more than its own launch takes.
        if norm is not None and not (isinstance(config, OneRowConfig) and config.width * GROUP >= self.inputs):
            x, norm = norm(x), None
        options = FewRowsOptions(residual=residual, out=residual, norm=norm)
        return self._few_rows(x, self._weight, self._scales, config, self._bias, options)

"""A linear whose weight stays in FP8 on a CUDA device, from compute capability 8.9 on."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.fp8.config import few_rows_config, many_rows_config
from aengine.kernels.linear.fp8.few_rows import FewRowsConfig, FewRowsOptions, Fp8FewRows
from aengine.kernels.linear.fp8.inputs import round_inputs
from aengine.kernels.linear.fp8.many_rows import many_rows
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.fp8.scales import kernel_scales
from aengine.kernels.linear.weights import Fp8Weight
from aengine.kernels.norms import silu_mul


class Fp8Linear:
    """Few rows stay in their own type, which is nearer to the truth than FP8; many are rounded as the format says.

    Everything is enqueued on the current stream; one stream at a time.
    """

    def __init__(self, weight: Fp8Weight, bias: Tensor | None, few_rows: Fp8FewRows) -> None:
        """bias [outputs]; few_rows: shared by all linears of a model, for its scratch. ValueError: see `fits`."""
        if not self.fits(weight):
            raise ValueError(f"an FP8 weight {list(weight.weight.shape)} has no kernel; use it dequantised")
        self.outputs, self.inputs = weight.weight.shape
        self._weight = weight.weight
        self._scales = kernel_scales(weight)
        self._activations = weight.activations
        self._input_scale = weight.input_scale
        self._bias = bias
        self._few_rows = few_rows

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Whether the kernels can read it: rows must begin at multiples of 16 bytes, blocks at multiples of 128."""
        k, columns = weight.weight.shape[1], weight.block[1]
        return weight.weight.is_contiguous() and k % 16 == 0 and (columns >= k or columns % GROUP == 0)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, None)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self._product(x, residual)

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        config = self._few(x)
        if config is None:
            return self._many(x, None, norm=norm)
        # Where x is longer, the norm holds up the stream of weights by more than its own launch takes.
        if config.one_row and config.early * GROUP >= self.inputs:
            options = FewRowsOptions(norm=norm)
            return self._few_rows(x.contiguous(), self._weight, self._scales, config, self._bias, options)
        return self(norm(x))

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        """`add_to` of SiLU(gate) * up: gate_up [tokens, 2 * inputs], gates first; many rows are rounded in one pass."""
        if self._few(gate_up) is None:
            return self._many(gate_up, residual, silu=True)
        return self._product(silu_mul(gate_up), residual)

    def _few(self, x: Tensor) -> FewRowsConfig | None:
        return few_rows_config(len(x), self.outputs, self.inputs, x.element_size(), launch_for(x.device))

    def _product(self, x: Tensor, residual: Tensor | None) -> Tensor:
        config = self._few(x)
        if config is None:
            return self._many(x, residual)
        options = FewRowsOptions(residual=residual, out=residual)
        return self._few_rows(x.contiguous(), self._weight, self._scales, config, self._bias, options)

    def _many(self, x: Tensor, residual: Tensor | None, norm: Norm | None = None, silu: bool = False) -> Tensor:
        rounded, scale = round_inputs(x, self._activations, self._input_scale, norm=norm, silu=silu)
        config = many_rows_config(len(x), self.outputs, launch_for(x.device))
        return many_rows(
            rounded, scale, self._activations, self._weight, self._scales, config,
            bias=self._bias, residual=residual, out=residual, dtype=x.dtype,
        )  # fmt: skip

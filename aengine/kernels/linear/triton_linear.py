"""A linear of 16-bit or 32-bit floats on a CUDA device: our own kernels for few rows, cuBLAS for many.

Gate and up of many rows have a kernel of our own again. It applies SiLU(gate) * up before it stores.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.gated_rows import gated_config, gated_rows
from aengine.kernels.linear.low_rank import LowRank
from aengine.kernels.linear.one_row import OneRowConfig, one_row
from aengine.kernels.linear.small_linear import MAX_ROWS, SmallLinear, linear_config

# From MANY_ROWS rows on, cuBLAS is slower if the outputs end within a tile: 16,384 rows of 2,048 inputs take 1,171 us
# for 12,352 outputs and 1,067 us for 12,288. The outputs of the last tile are then a product of their own.
TILE = 256
MANY_OUTPUTS = 8192
MANY_ROWS = 8192


class TritonLinear:
    """Everything is enqueued on the current stream. Use one stream at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, few_rows: SmallLinear) -> None:
        """weight: [outputs, inputs]. bias: [outputs]. few_rows: shared by all linears of a model, for its scratch."""
        self.outputs, self.inputs = weight.shape
        self.weight = weight
        self.bias = bias
        self._contiguous = weight.is_contiguous()
        self._few_rows = few_rows

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self.weight, "bias": self.bias}

    def norms(self, x: Tensor, norm: Norm) -> bool:
        """Return whether `apply` fuses the norm at no cost: x is a single row, and every program reads all of it.

        Then the caller computes `low_rank` from x times the norm's weight, because `apply` does the rest of the norm.
        """
        if len(x) != 1 or not self._contiguous or not norm.is_rms:
            return False
        # Read in short pieces, a weight of another type is slower than a launch (bench/KERNELS.md).
        if norm.weight.dtype != x.dtype and self.inputs % 1024:
            return False
        config = linear_config(1, *self.weight.shape, x.element_size(), launch_for(x.device), normed=True)
        # For a longer x, its sum of squares delays the stream of weights by more than a launch takes.
        return isinstance(config, OneRowConfig) and config.early >= self.inputs

    def apply(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        low_rank: LowRank | None = None,
    ) -> Tensor:
        weight, bias, fused = self.weight, self.bias, None
        if gated:
            x = silu_mul(x)
        elif norm is not None and len(x) == 1 and self.norms(x, norm):
            fused = norm
        elif norm is not None:
            x = norm(x)
        rows = len(x)
        if rows <= MAX_ROWS and self._contiguous:
            launch = launch_for(x.device)
            config = linear_config(rows, *weight.shape, x.element_size(), launch, fused is not None)
            if isinstance(config, OneRowConfig):
                x = x.contiguous()
                return one_row(x, weight, config, bias, residual=residual, norm=fused, low_rank=low_rank)
            if config is not None:
                return self._few_rows(x, weight, bias, residual=residual, config=config, low_rank=low_rank)
        if residual is None:
            return self._many_rows(x) if rows >= MANY_ROWS else F.linear(x, weight, bias)
        if bias is not None:  # addmm_ adds the product to the residual, but takes no bias
            return residual.add_(F.linear(x, weight, bias))
        return residual.addmm_(x, weight.t())

    def _many_rows(self, x: Tensor) -> Tensor:
        whole = self.outputs // TILE * TILE
        if not MANY_OUTPUTS <= whole < self.outputs or self.bias is not None:
            return F.linear(x, self.weight, self.bias)
        out = x.new_empty(len(x), self.outputs)
        for columns in (slice(whole), slice(whole, None)):
            torch.mm(x, self.weight[columns].t(), out=out[:, columns])
        return out

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> Tensor | None:
        if self.bias is not None or not self._contiguous:
            return None
        config = gated_config(len(x), self.outputs // 2, self.inputs, x.element_size(), launch_for(x.device))
        return None if config is None else gated_rows(x if norm is None else norm(x), self.weight, config)

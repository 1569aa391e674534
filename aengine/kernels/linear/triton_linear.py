"""A linear of 16-bit or 32-bit floats on a CUDA device: our own kernel for few rows, cuBLAS for many.

But gate and up of many rows have one of our own again, which applies SiLU(gate) * up before it stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.elementwise import silu_mul
from aengine.kernels.launch import launch_for
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.gated_rows import gated_config, gated_rows
from aengine.kernels.linear.low_rank import LowRank
from aengine.kernels.linear.small_linear import SmallLinear

# Of so many rows the library is slower where the outputs end in a part of a tile (12,352 of them by 16,384 rows of
# 2,048: 1,171 us, 12,288 of them: 1,067): those few are a product of their own.
TILE = 256
MANY_OUTPUTS = 8192
MANY_ROWS = 8192


class TritonLinear:
    """Everything is enqueued on the current stream; one stream at a time."""

    def __init__(self, weight: Tensor, bias: Tensor | None, few_rows: SmallLinear) -> None:
        """weight [outputs, inputs], bias [outputs]; few_rows: shared by all linears of a model, for its scratch."""
        self.outputs, self.inputs = weight.shape
        self._weight = weight
        self._bias = bias
        self._few_rows = few_rows

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self._weight, "bias": self._bias}

    @property
    def weight(self) -> Tensor:
        """[outputs, inputs]."""
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """[outputs]."""
        return self._bias

    def adds(self, rows: int, outputs: Sequence[int], rank: int) -> bool:
        """Whether methods take a `low_rank` of so many rows, of adapters of this rank; outputs: of each part."""
        return self._few_rows.adds(rows, self._weight, outputs, rank)

    def single(self, x: Tensor) -> bool:
        """Whether x is a single row, for the kernel of one: its `low_rank` has another form."""
        return self._few_rows.single(x, self._weight)

    def norms(self, x: Tensor, norm: Norm) -> bool:
        """Whether `after` is one kernel, so that its `low_rank` is of x times the norm's weight alone."""
        return self._few_rows.norms(x, self._weight, norm)

    def __call__(self, x: Tensor, low_rank: LowRank | None = None) -> Tensor:
        if self._few_rows.supports(x, self._weight):
            return self._few_rows(x, self._weight, self._bias, low_rank=low_rank)
        whole = self.outputs // TILE * TILE
        if len(x) >= MANY_ROWS and MANY_OUTPUTS <= whole < self.outputs and self._bias is None:
            out = x.new_empty(len(x), self.outputs)
            for columns in (slice(whole), slice(whole, None)):
                torch.mm(x, self._weight[columns].t(), out=out[:, columns])
            return out
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: Tensor, residual: Tensor, low_rank: LowRank | None = None) -> Tensor:
        if self._few_rows.supports(x, self._weight):
            return self._few_rows(x, self._weight, self._bias, residual=residual, out=residual, low_rank=low_rank)
        if self._bias is not None:  # which goes along with a product, but not with one that adds to something
            return residual.add_(F.linear(x, self._weight, self._bias))
        return residual.addmm_(x, self._weight.t())

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        return self.add_to(silu_mul(gate_up), residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        return self(silu_mul(gate_up))

    def after(self, norm: Norm, x: Tensor, low_rank: LowRank | None = None) -> Tensor:
        if self.norms(x, norm):
            return self._few_rows(x, self._weight, self._bias, norm=norm, low_rank=low_rank)
        return self(norm(x), low_rank)

    def activated(self, norm: Norm | None, x: Tensor) -> Tensor | None:
        if self._bias is not None or not self._weight.is_contiguous():
            return None
        config = gated_config(len(x), self.outputs // 2, self.inputs, x.element_size(), launch_for(x.device))
        return None if config is None else gated_rows(x if norm is None else norm(x), self._weight, config)

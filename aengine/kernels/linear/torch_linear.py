"""A linear of plain torch: on a CPU in float32 with its weight in oneDNN's own layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.packed_linear import pack, packed_linear


class TorchLinear:
    """The reference for every other linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [outputs, inputs], bias [outputs]; the weight may be copied, so its contents are final."""
        self.outputs, self.inputs = weight.shape
        self._weight = pack(weight)
        self._bias = bias

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self._weight, "bias": self._bias}

    def __call__(self, x: Tensor) -> Tensor:
        if self._weight.is_mkldnn:
            return packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return self(x).add_(residual)

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.add_to(F.silu(gate).mul_(up), residual)

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self(F.silu(gate).mul_(up))

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        return self(norm(x))

    def activated(self, norm: Norm | None, x: Tensor) -> None:
        return None

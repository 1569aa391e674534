"""A linear in plain torch. On a CPU, large float32 weights are in oneDNN's own layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.packed_linear import pack, packed_linear


class TorchLinear:
    """The reference for every other linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [outputs, inputs], with its final contents, since it may be copied. bias: [outputs]."""
        self.outputs, self.inputs = weight.shape
        self._weight = pack(weight)
        self._packed = self._weight.is_mkldnn
        self._bias = bias

    @property
    def parameters(self) -> Mapping[str, object]:
        return {"weight": self._weight, "bias": self._bias}

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        if norm is not None:
            x = norm(x)
        elif gated:
            gate, up = x.chunk(2, dim=-1)
            x = F.silu(gate).mul_(up)
        product = packed_linear if self._packed else F.linear
        out = product(x, self._weight, self._bias)
        return out if residual is None else out.add_(residual)

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> None:
        return None

"""A LayerNorm, on any device. Few families have it, so it is torch's kernel, and no other kernel computes it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor


@dataclass(slots=True)
class LayerNorm:
    """A norm that subtracts the mean first. It rounds once, after it has applied weight and bias."""

    weight: Tensor  # [width], in the dtype of x
    eps: float
    bias: Tensor | None = None  # [width]
    is_rms: ClassVar[bool] = False

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))


@dataclass(slots=True)
class HeadLayerNorms:
    """A LayerNorm over each head, with a weight for each head. It applies the weight in float32, like Cohere."""

    weight: Tensor  # [heads, dim]
    eps: float
    is_rms: ClassVar[bool] = False

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, heads * dim] -> the same shape."""
        heads = x.unflatten(-1, self.weight.shape).float()
        return (
            F.layer_norm(heads, self.weight.shape[1:], None, None, self.eps).mul_(self.weight).flatten(-2).to(x.dtype)
        )

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(self(x))

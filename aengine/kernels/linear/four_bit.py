"""Matrices of 4-bit codes with a scale per group of columns: int4 (AWQ, GPTQ, compressed-tensors) and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the value of a code's lower three bits; the fourth is its sign


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """w[i, j] = (codes[i, j] - zero[i, g]) * scale[i, g] with g = j // group; it multiplies x[order[j]].

    zero: without one it is 8 everywhere. order: without one column j multiplies x[j].
    """

    codes: Tensor  # [n, k] uint8, 0 to 15
    scale: Tensor  # [n, k / group]
    zero: Tensor | None = None  # [n, k / group] uint8
    order: Tensor | None = None  # [k] int64, a permutation

    def __post_init__(self) -> None:
        """Raises ValueError where the shapes do not fit together."""
        n, k = self.codes.shape
        groups = self.scale.shape[1]
        if len(self.scale) != n or not groups or k % groups:
            raise ValueError(f"scale {list(self.scale.shape)} does not fit codes [{n}, {k}]")
        if self.zero is not None and self.zero.shape != self.scale.shape:
            raise ValueError(f"zero {list(self.zero.shape)} does not fit scale {list(self.scale.shape)}")
        if self.order is not None and self.order.shape != (k,):
            raise ValueError(f"order {list(self.order.shape)} does not fit codes [{n}, {k}]")

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.codes.shape[1] // self.scale.shape[1]

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [n, k], its columns in the order of x."""
        n, k = self.codes.shape
        steps = self.codes.view(n, -1, self.group).to(torch.float32)
        steps -= 8 if self.zero is None else self.zero.unsqueeze(-1)
        dense = steps.mul_(self.scale.float().unsqueeze(-1)).view(n, k).to(dtype)
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """w[i, j] = e2m1(codes[i, j]) * 2 ** (scale[i, j // 32] - 127)."""

    codes: Tensor  # [n, k] uint8, 0 to 15
    scale: Tensor  # [n, k / 32] uint8, E8M0

    def __post_init__(self) -> None:
        """Raises ValueError where the shapes do not fit together."""
        n, k = self.codes.shape
        if tuple(self.scale.shape) != (n, k // MXFP4_GROUP) or k % MXFP4_GROUP:
            raise ValueError(f"scale {list(self.scale.shape)} does not fit codes [{n}, {k}] in groups of {MXFP4_GROUP}")

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return MXFP4_GROUP

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dense matrix [n, k]."""
        n, k = self.codes.shape
        values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=self.codes.device)
        steps = values[self.codes.int()].view(n, -1, MXFP4_GROUP)
        return torch.ldexp(steps, (self.scale.int() - 127).unsqueeze(-1)).view(n, k).to(dtype)

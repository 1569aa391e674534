"""4-bit floats in groups that share a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aengine.kernels.linear.weights.e2m1 import E2m1Weight


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(E2m1Weight):
    """4-bit floats (e2m1) in groups of 32 columns, each times 2 ** (scale - 127). The scale is uint8."""

    group: ClassVar[int] = 32

    def dequantize(self) -> Tensor:
        return self._scaled(powers_of_two(self.scale))


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127) in float32 for exponents in uint8 (e8m0)."""
    wide = exponents.int()
    # The bits of a float32. 2 ** -127 is a subnormal.
    return torch.where(wide == 0, 1 << 22, wide << 23).view(torch.float32)

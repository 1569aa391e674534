"""4-bit floats in groups that share an 8-bit float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from aengine.kernels.linear.weights.e2m1 import E2m1Weight


@dataclass(frozen=True, slots=True)
class Nvfp4Weight(E2m1Weight):
    """4-bit floats (e2m1) in groups of 16 columns, times the group's scale in float8_e4m3fn and the factor of the row.

    A number times its scale has at most six significant bits, so it is exact in 16 bits.
    """

    group: ClassVar[int] = 16

    # [..., n, 1] float32. Files have one for a matrix; rows of several matrices become one matrix.
    factor: Tensor

    def dequantize(self) -> Tensor:
        return self._scaled(self.scale.float()).mul_(self.factor)

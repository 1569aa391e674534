"""The scales of an FP8 weight as the kernels read them: for each 128 columns, or one for a whole row."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.weights import Fp8Weight


@dataclass(frozen=True, slots=True)
class KernelScales:
    """rows: of the weight that share scales; grouped: each 128 columns have their own."""

    scale: Tensor  # [ceil(n / rows), ceil(k / 128)], or [ceil(n / rows), 1] where not grouped
    rows: int
    grouped: bool


def kernel_scales(weight: Fp8Weight) -> KernelScales:
    """Wider blocks are repeated; a scale of the inputs that is known beforehand stays apart."""
    k = weight.weight.shape[1]
    scale = weight.scale
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(weight.block[1] // GROUP, 1)[:, : -(-k // GROUP)]
    return KernelScales(scale.contiguous(), weight.block[0], scale.shape[1] > 1)

"""cuBLAS on FP8: groups of 128 by blocks of 128 x 128 on Hopper, tokens by channels, and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.launch import launch_for
from aengine.kernels.linear.fp8.quantize import GROUP
from aengine.kernels.linear.weights import Fp8Weight


class LibraryFp8:
    """A weight as cuBLAS reads it: its scales in float32, along k padded to a multiple of four."""

    def __init__(self, weight: Fp8Weight) -> None:
        self._weight = weight.weight.t()
        self._grouped = weight.activations == "group"
        scale = weight.scale
        if self._grouped:
            self._scale = F.pad(scale, (0, -scale.shape[1] % 4)).t()  # [groups, n / 128], strides (1, groups)
        else:
            self._scale = scale.view(1, -1)

    @staticmethod
    def fits(weight: Fp8Weight) -> bool:
        """Whether cuBLAS knows this kind of scales on this device."""
        n, k = weight.weight.shape
        if n % 16 or k % 16 or launch_for(weight.weight.device).capability[0] != 9:
            return False
        if weight.activations == "group":
            return weight.block == (GROUP, GROUP)
        return weight.activations == "token" and weight.block[0] == 1 and weight.block[1] >= k

    def multiple(self, m: int) -> int:
        """Of what the number of rows is made one: 4 is needed; with groups, 129 to 255 rows take longer than 256."""
        return 256 if self._grouped and 128 < m < 256 else 4

    def __call__(self, x: Tensor, x_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x [m, k] e4m3 with its scales as `round_inputs` gives them -> [m, n] of `dtype`; m a multiple of four."""
        if x.is_meta:  # torch does not know the shape of what it would return
            return x.new_empty(len(x), self._weight.shape[1], dtype=dtype)
        if self._grouped:
            recipes = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
            scale_x = x_scale.t()
        else:
            recipes = F.ScalingType.RowWise, F.ScalingType.RowWise
            scale_x = x_scale[:, None]
        out: Tensor = F.scaled_mm(
            x, self._weight, scale_x, recipes[0], self._scale, recipes[1], bias=bias, output_dtype=dtype
        )
        return out

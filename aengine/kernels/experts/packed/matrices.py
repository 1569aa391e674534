"""One matrix of 4-bit codes for each expert, as the kernels read it: four codes in a word of 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.linear.weights import INT4_MIDDLE, Int4Weight, Mxfp4Weight

BLOCK = 128  # columns: 32 words, of which word c holds columns c, 32 + c, 64 + c and 96 + c, the first lowest
QUARTER = 32


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Each value is a code's number, less the zero where there are zeros, times the scale of its group of columns."""

    words: Tensor  # [E, n, k / 4] int16
    scale: Tensor  # float32 [E, n, k / group]; of mxfp4 uint8, its exponents
    zero: Tensor | None  # uint8 [E, n, k / group]; None: 8 everywhere, of mxfp4 0
    group: int
    mxfp4: bool

    @staticmethod
    def fits(weight: Int4Weight | Mxfp4Weight) -> bool:
        """Whether the kernel can read it: blocks of 128 columns in their order, groups of 32, 64 or blocks."""
        group = weight.group
        in_order = isinstance(weight, Mxfp4Weight) or weight.order is None
        return in_order and weight.codes.shape[-1] % BLOCK == 0 and (group in (32, 64) or group % BLOCK == 0)

    @classmethod
    def of(cls, weight: Int4Weight | Mxfp4Weight) -> PackedMatrices:
        """ValueError: see `fits`. One expert at a time, so that no second copy of all codes is made."""
        if not cls.fits(weight):
            raise ValueError(f"4-bit weights {list(weight.codes.shape)} have no kernel; use them dequantised")
        experts, n, k = weight.codes.shape
        words = torch.empty(experts, n, k // 4, dtype=torch.int16, device=weight.codes.device)
        for codes, out in zip(weight.codes, words):
            quarters = codes.view(n, -1, 4, QUARTER)
            low, high = quarters[:, :, 0] | quarters[:, :, 1] << 4, quarters[:, :, 2] | quarters[:, :, 3] << 4
            out.copy_(torch.stack((low, high), dim=-1).view(torch.int16).view(n, -1))  # little-endian
        if isinstance(weight, Mxfp4Weight):
            return cls(words, weight.scale.contiguous(), None, weight.group, mxfp4=True)
        zero = None if weight.zero is None else weight.zero.contiguous()
        return cls(words, weight.scale.float().contiguous(), zero, weight.group, mxfp4=False)

    @property
    def constants(self) -> dict[str, int | bool]:
        """What a kernel knows of the codes when it is compiled."""
        return {"GROUP": self.group, "MXFP4": self.mxfp4, "ZEROS": self.zero is not None, "MIDDLE": INT4_MIDDLE}

    @property
    def pointers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Words, scales and zeros; without zeros, the scales again."""
        return self.words, self.scale, self.scale if self.zero is None else self.zero

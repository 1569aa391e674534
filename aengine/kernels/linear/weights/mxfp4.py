"""4-bit floats in groups that share a power of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight, cat_rows, pad_rows, some_rows

MXFP4_GROUP = 32  # columns that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class Mxfp4Weight(QuantizedWeight):
    """4-bit floats (e2m1) in groups of 32 columns, each group times a power of two.

    Codes stay two in a byte: unpacked, the experts of a layer take half a gigabyte more while they are loaded.
    """

    pairs: Tensor  # [..., n, k / 2] uint8, the lower half first
    scale: Tensor  # [..., n, k / 32] uint8: 2 ** (scale - 127)

    @classmethod
    def from_codes(cls, codes: Tensor, scale: Tensor) -> Self:
        """codes [..., n, k] uint8, 0 to 15."""
        return cls(codes[..., 0::2] | codes[..., 1::2] << 4, scale)

    @property
    def codes(self) -> Tensor:
        """[..., n, k] uint8, 0 to 15; bit 3 is the sign."""
        return torch.stack((self.pairs & 15, self.pairs >> 4), -1).flatten(-2)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.pairs.shape[:-1], 2 * self.pairs.shape[-1]))

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return MXFP4_GROUP

    def dequantize(self) -> Tensor:
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.pairs.device)
        out = values.index_select(0, self.codes.flatten().int()).view(self.shape)
        exponent = self.scale.int()
        # The bits of a float32. 2 ** -127 is a subnormal.
        bits = torch.where(exponent == 0, 1 << 22, exponent << 23)
        out.unflatten(-1, (-1, MXFP4_GROUP)).mul_(bits.view(torch.float32).unsqueeze(-1))
        return out

    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        parts = [self, *others]
        return type(self)(cat_rows([part.pairs for part in parts]), cat_rows([part.scale for part in parts]))

    def _rows(self, first: int, end: int) -> Self:
        return type(self)(some_rows(self.pairs, first, end), some_rows(self.scale, first, end))

    def pad(self, count: int) -> Self:
        return type(self)(pad_rows(self.pairs, count), pad_rows(self.scale, count))

    def even_rows_first(self) -> Self:
        pairs, scale = (torch.cat((one[..., 0::2, :], one[..., 1::2, :]), dim=-2) for one in (self.pairs, self.scale))
        return type(self)(pairs, scale)

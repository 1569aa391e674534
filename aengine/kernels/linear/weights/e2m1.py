"""4-bit floats, two in a byte, in groups that share a scale: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight, cat_rows, pad_rows, some_rows

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes by the lower three bits; the fourth is the sign


@dataclass(frozen=True, slots=True)
class E2m1Weight(QuantizedWeight):
    """4-bit floats (e2m1) in groups of neighbouring columns that share a scale. A subclass says what a scale is.

    Codes stay two in a byte: unpacked, the experts of a layer take half a gigabyte more while they are loaded.
    Every field of a subclass is a tensor [..., n, any].
    """

    group: ClassVar[int]  # columns that share a scale

    pairs: Tensor  # [..., n, k / 2] uint8, the lower half first
    scale: Tensor  # [..., n, k / group]

    @classmethod
    def from_codes(cls, codes: Tensor, *others: Tensor) -> Self:
        """codes [..., n, k] uint8, 0 to 15. others: the other fields in order."""
        return cls(codes[..., 0::2] | codes[..., 1::2] << 4, *others)

    @property
    def codes(self) -> Tensor:
        """[..., n, k] uint8, 0 to 15; bit 3 is the sign."""
        return torch.stack((self.pairs & 15, self.pairs >> 4), -1).flatten(-2)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.pairs.shape[:-1], 2 * self.pairs.shape[-1]))

    def part(self, at: Any) -> Self:
        """Return the part of the weight at an index of leading axes and rows."""
        return self._each(lambda tensor: tensor[at])

    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        parts = [self, *others]
        return type(self)(*(cat_rows([getattr(part, one.name) for part in parts]) for one in fields(self)))

    def _rows(self, first: int, end: int) -> Self:
        return self._each(lambda tensor: some_rows(tensor, first, end))

    def pad(self, count: int) -> Self:
        return self._each(lambda tensor: pad_rows(tensor, count))

    def even_rows_first(self) -> Self:
        return self._each(lambda tensor: torch.cat((tensor[..., 0::2, :], tensor[..., 1::2, :]), dim=-2))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(*(change(getattr(self, one.name)) for one in fields(self)))

    def _scaled(self, scale: Tensor) -> Tensor:
        """Return the numbers of all codes times `scale` [..., n, k / group] float32."""
        values = torch.tensor([*E2M1, *(-value for value in E2M1)], device=self.pairs.device)
        out = values.index_select(0, self.codes.flatten().int()).view(self.shape)
        out.unflatten(-1, (-1, self.group)).mul_(scale.unsqueeze(-1))
        return out


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

"""Floats that a format without kernels was unpacked into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aengine.kernels.linear.weights.base import QuantizedWeight, cat_rows, pad_rows, some_rows


@dataclass(frozen=True, slots=True)
class FloatWeight(QuantizedWeight):
    """A matrix that is dequantised already."""

    values: Tensor  # [..., n, k] float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        return self.values

    def cat(self, others: Sequence[Self], names: Sequence[str] = ()) -> Self:
        return type(self)(cat_rows([one.values for one in (self, *others)]))

    def _rows(self, first: int, end: int) -> Self:
        return type(self)(some_rows(self.values, first, end))

    def pad(self, count: int) -> Self:
        return type(self)(pad_rows(self.values, count))

    def columns(self, first: int, end: int) -> Self:
        return type(self)(self.values[..., first:end].contiguous())

"""8-bit integers in groups of columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from aengine.kernels.linear.weights.int4 import Int4Weight
from aengine.kernels.linear.weights.integers import IntWeight

# Columns: kernels of 4-bit codes know groups of whole multiples, of half of them and of the least.
_WHOLE, _LEAST = 128, 32


@dataclass(frozen=True, slots=True)
class Int8Weight(IntWeight):
    """8-bit integers: codes are 0 to 255."""

    middle: ClassVar[int] = 128

    @property
    def has_halves(self) -> bool:
        """Whether kernels can read `halves`."""
        return self._shorter_group >= _LEAST

    @property
    def _shorter_group(self) -> int:
        return self.group if not self.group % _WHOLE else math.gcd(self.group, _WHOLE)

    def halves(self) -> Int4Weight:
        """Return a weight of 4-bit codes with twice the columns, which gives the same products.

        Its first columns have the upper halves of the codes, with scales 16 times as large, and the others the lower
        halves. Both multiply the same inputs.
        """
        k, group, shorter = self.codes.shape[-1], self.group, self._shorter_group
        scale = self.scale.float().repeat_interleave(group // shorter, -1)
        middle = scale.new_full(scale.shape, self.middle, dtype=torch.uint8)
        zero = middle if self.zero is None else self.zero.repeat_interleave(group // shorter, -1)
        order = torch.arange(k, device=self.codes.device) if self.order is None else self.order
        return Int4Weight(
            _beside(self.codes >> 4, self.codes & 15),
            _beside(16 * scale, scale),
            _beside(zero >> 4, zero & 15),
            _beside(order, order),
        )


def _beside(upper: Tensor, lower: Tensor) -> Tensor:
    return torch.cat((upper, lower), -1)

"""4-bit integers in groups of columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from aengine.kernels.linear.weights.integers import IntWeight


@dataclass(frozen=True, slots=True)
class Int4Weight(IntWeight):
    """4-bit integers: codes are 0 to 15."""

    middle: ClassVar[int] = 8

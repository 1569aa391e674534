"""An adapter in host memory, as a rank's places take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """What an adapter adds to one linear, which may be several fused ones. In the model's dtype."""

    a: Tensor  # [parts, rank, inputs]; zero where a part has a smaller rank, or none
    b: Tensor  # [outputs, rank], times the adapter's scale


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """All that one adapter adds, of the whole model."""

    rank: int  # the largest of its modules
    linears: Mapping[str, Factors]  # by the names of the linears; what it leaves out has none

    @property
    def bytes(self) -> int:
        return sum(factors.a.nbytes + factors.b.nbytes for factors in self.linears.values())

"""Which part of a model a rank holds: heads, columns of MLPs and rows of the vocabulary, dealt out in equal shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["outputs", "inputs"]  # of a linear; None instead: every rank has all of it


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a linear that stay together in units: `units` heads of `size`, or single columns."""

    units: int
    size: int = 1

    @property
    def width(self) -> int:
        return self.units * self.size


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shares."""

    index: int = 0
    count: int = 1

    @property
    def whole(self) -> bool:
        return self.count == 1

    def units(self, units: int) -> int:
        """How many units a rank has; where there are fewer than ranks, several ranks have the same one."""
        return max(1, units // self.count)

    def range(self, part: Part) -> tuple[int, int]:
        """The first of this rank's outputs, and the one behind its last. `shardable` says which parts there can be."""
        units = self.units(part.units)
        first = self.index * part.units // self.count
        return first * part.size, (first + units) * part.size

    def rows(self, total: int) -> tuple[int, int]:
        """The same of rows that need not be a multiple of the ranks: the last ranks may have fewer, or none."""
        each = self.each(total)
        return min(self.index * each, total), min((self.index + 1) * each, total)

    def each(self, total: int) -> int:
        """The most rows that a rank has of so many."""
        return -(-total // self.count)


def shardable(units: int, count: int, replicated: bool = False) -> bool:
    """Whether so many units can be dealt out evenly. replicated: whether several ranks may have the same one."""
    return units % count == 0 or (replicated and count % units == 0)

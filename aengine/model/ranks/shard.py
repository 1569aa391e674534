"""Divides a model among ranks: heads, columns of MLPs, experts and rows of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["outputs", "inputs"]  # of a linear; None: every rank has the whole linear
Range = tuple[int, int]  # first, end


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a linear that consist of units, such as heads of `size` outputs. Units are divided among ranks."""

    units: int
    size: int = 1

    @property
    def width(self) -> int:
        return self.units * self.size


def width(parts: Part | tuple[Part, ...]) -> int:
    """Return the number of outputs of a tensor."""
    return sum(part.width for part in parts) if isinstance(parts, tuple) else parts.width


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of a model that rank `index` of `count` ranks holds."""

    index: int = 0
    count: int = 1

    def units(self, units: int) -> int:
        """Return how many units a rank has. If there are fewer units than ranks, several ranks have the same unit."""
        return max(1, units // self.count)

    def range(self, part: Part) -> Range:
        """Return this rank's outputs. `LayerSpec.indivisible` says which parts can be divided."""
        units = self.units(part.units)
        first = self.index * part.units // self.count
        return first * part.size, (first + units) * part.size

    def ranges(self, parts: Part | tuple[Part, ...]) -> tuple[Range, ...]:
        """Return this rank's outputs of a tensor that consists of several parts."""
        found, at = [], 0
        for part in parts if isinstance(parts, tuple) else (parts,):
            first, last = self.range(part)
            found.append((at + first, at + last))
            at += part.width
        return tuple(found)

    def rows(self, total: int, multiple: int = 1) -> Range:
        """Return this rank's rows. If they do not divide evenly, the last ranks have fewer rows or none."""
        each = self.rows_per_rank(total, multiple)
        return min(self.index * each, total), min((self.index + 1) * each, total)

    def rows_per_rank(self, total: int, multiple: int = 1) -> int:
        """Return the largest number of rows that a rank has, rounded up to a multiple."""
        each = -(-total // self.count)
        return -(-each // multiple) * multiple

    def experts(self, total: int) -> Range:
        """Return this rank's experts. The numbers of two ranks differ by one at most."""
        return self.index * total // self.count, (self.index + 1) * total // self.count


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """A rank's part of a layer's experts: columns of all experts, or some whole experts."""

    experts: Range
    columns: Range | None = None  # of the experts' inner columns; None: all

    @property
    def count(self) -> int:
        return self.experts[1] - self.experts[0]

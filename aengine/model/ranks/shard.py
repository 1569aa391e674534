"""Which part of a model a rank holds: heads, columns of MLPs and rows of the vocabulary, dealt out in equal shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["outputs", "inputs"]  # of a linear; None instead: every rank has all of it
Range = tuple[int, int]  # the first, and the one behind the last


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs of a linear that stay together in units: `units` heads of `size`, or single columns."""

    units: int
    size: int = 1

    @property
    def width(self) -> int:
        return self.units * self.size


def width(parts: Part | tuple[Part, ...]) -> int:
    """Of all outputs of a tensor."""
    return sum(part.width for part in parts) if isinstance(parts, tuple) else parts.width


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shares."""

    index: int = 0
    count: int = 1

    def units(self, units: int) -> int:
        """How many units a rank has; where there are fewer than ranks, several ranks have the same one."""
        return max(1, units // self.count)

    def range(self, part: Part) -> Range:
        """This rank's outputs. `LayerSpec.indivisible` says which parts there can be."""
        units = self.units(part.units)
        first = self.index * part.units // self.count
        return first * part.size, (first + units) * part.size

    def ranges(self, parts: Part | tuple[Part, ...]) -> tuple[Range, ...]:
        """This rank's outputs of a tensor that has several parts, one behind the other."""
        found, at = [], 0
        for part in parts if isinstance(parts, tuple) else (parts,):
            first, last = self.range(part)
            found.append((at + first, at + last))
            at += part.width
        return tuple(found)

    def rows(self, total: int, multiple: int = 1) -> Range:
        """The same of rows that need not be a multiple of the ranks: the last ranks may have fewer, or none."""
        each = self.each(total, multiple)
        return min(self.index * each, total), min((self.index + 1) * each, total)

    def each(self, total: int, multiple: int = 1) -> int:
        """The most rows that a rank has of so many. multiple: of which this is one."""
        each = -(-total // self.count)
        return -(-each // multiple) * multiple

    def experts(self, total: int) -> Range:
        """This rank's of so many experts: as many as the other ranks have, or one more or less."""
        return self.index * total // self.count, (self.index + 1) * total // self.count


@dataclass(frozen=True, slots=True)
class ExpertsShare:
    """What a rank has of a layer's experts: columns of all of them, or some of them whole."""

    experts: Range
    columns: Range | None = None  # of the inner ones; None: all

    @property
    def count(self) -> int:
        return self.experts[1] - self.experts[0]

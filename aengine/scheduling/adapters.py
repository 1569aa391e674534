"""An adapter as the scheduler knows it: which place of the device it lies in, and how many rows use it there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One loading of an adapter. Its generation is never given again, not even to the same files: what was computed
    with it is found by nobody else.
    """

    generation: int
    name: str = ""
    place: int = 0  # on the device; 0: none
    there: bool = False  # its weights lie in the place: rows may enter
    rows: int = 0  # held by its sequences: a step in flight may name the place for each
    until_shut: int | None = None  # rows that may still come free before nobody enters any more; None: it is open

    def take_row(self) -> int:
        """A sequence enters: the place that its row names."""
        self.rows += 1
        return self.place

    def free_row(self) -> None:
        """No step in flight names the place for one of the rows any more."""
        self.rows -= 1
        if self.until_shut:
            self.until_shut -= 1


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """An adapter on its way to a place, which no row uses until it is there."""

    adapter: LoadedAdapter
    place: int

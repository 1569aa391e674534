"""Slots of recurrent states on the fake device: what a slot keeps is the identity of the prefix that was read."""

from __future__ import annotations

from aengine.cache.snapshots import slot_of
from aengine.step_plan import StepPlan

LOST = -3  # what is left where a step failed, or nobody wrote


class FakeStates:
    """States move as a plan says; a row that goes on from another prefix than its own is found at once."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, int]] = {}  # by slot: the prefix, and the era of the row that read it

    def load(self, plan: StepPlan) -> None:
        """Before the forward pass: rows that go on from a snapshot."""
        for source, destination in plan.state_loads:
            self._kept[destination] = self._kept.get(source, (LOST, 0))

    def advance(self, row: int, path: list[int], start: int, end: int, era: int, broken: bool) -> None:
        """The row reads the tokens from `start` to before `end`; path: the prefix that ends in each."""
        if start and not broken:
            prefix, began = self._kept.get(slot_of(row), (LOST, 0))
            if prefix != path[start - 1]:
                raise AssertionError(f"row {row} goes on at {start} with the state of another prefix: {prefix}")
            if began < era:
                raise AssertionError(f"row {row} goes on from what was there before the cache was flushed")
        self._kept[slot_of(row)] = LOST if broken else path[end - 1], era

    def save(self, plan: StepPlan, rows: dict[int, tuple[list[int], int, bool]]) -> None:
        """What chunks save as they are read; rows: path, era and whether it is broken, of each."""
        written = [slot for chunk in plan.prefill for _, slot in chunk.saves]
        written += [slot_of(row) for row in (*plan.decode, *(chunk.row for chunk in plan.prefill))]
        if len(written) != len(set(written)):
            raise AssertionError(f"a slot is written twice in one step: {written}")
        for chunk in plan.prefill:
            path, era, broken = rows[chunk.row]
            for count, slot in chunk.saves:
                self._kept[slot] = LOST if broken else path[chunk.start + count - 1], era

    def copy(self, plan: StepPlan) -> None:
        """After the forward pass: forks, and snapshots of outputs."""
        for source, destination in plan.state_copies:
            self._kept[destination] = self._kept.get(source, (LOST, 0))

    def fail(self, plan: StepPlan) -> None:
        """Whatever the step would have written may have been, in part."""
        written = [slot for pairs in (plan.state_loads, plan.state_copies) for _, slot in pairs]
        written += [slot for chunk in plan.prefill for _, slot in chunk.saves]
        written += [slot_of(row) for row in (*plan.decode, *(chunk.row for chunk in plan.prefill))]
        for slot in written:
            self._kept[slot] = LOST, 0

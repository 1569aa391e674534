"""Slots of recurrent states on the fake device. A slot keeps the identity of the prefix that was read."""

from __future__ import annotations

from aengine.cache.snapshots import slot_of
from aengine.step_plan import StepPlan

LOST = -3  # content of a slot after a failed step, or before the first write


class FakeStates:
    """Moves states as plans say. A row that continues from another prefix than its own is found at once."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[int, int]] = {}  # slot -> prefix, and era of the row that read it

    def load(self, plan: StepPlan) -> None:
        """Load snapshots for new rows, before the forward pass."""
        for source, destination in plan.state_loads:
            self._kept[destination] = self._kept.get(source, (LOST, 0))

    def advance(self, row: int, path: list[int], start: int, end: int, era: int, broken: bool) -> None:
        """Let a row read the tokens from `start` up to, without, `end`. path: the prefix that ends in each token."""
        if start and not broken:
            prefix, began = self._kept.get(slot_of(row), (LOST, 0))
            if prefix != path[start - 1]:
                raise AssertionError(f"row {row} goes on at {start} with the state of another prefix: {prefix}")
            if began < era:
                raise AssertionError(f"row {row} goes on from what was there before the cache was flushed")
        self._kept[slot_of(row)] = LOST if broken else path[end - 1], era

    def save(self, plan: StepPlan, rows: dict[int, tuple[list[int], int, bool]]) -> None:
        """Save states inside chunks. rows: path, era and whether it is broken, for each row."""
        written = [slot for chunk in plan.prefill for _, slot in chunk.saves]
        written += [slot_of(row) for row in (*plan.decode, *(chunk.row for chunk in plan.prefill))]
        if len(written) != len(set(written)):
            raise AssertionError(f"a slot is written twice in one step: {written}")
        for chunk in plan.prefill:
            path, era, broken = rows[chunk.row]
            for count, slot in chunk.saves:
                self._kept[slot] = LOST if broken else path[chunk.start + count - 1], era

    def copy(self, plan: StepPlan) -> None:
        """Copy states after the forward pass: for forks, and for snapshots of outputs."""
        for source, destination in plan.state_copies:
            self._kept[destination] = self._kept.get(source, (LOST, 0))

    def fail(self, plan: StepPlan) -> None:
        """Mark all slots that a failed step may have written."""
        written = [slot for pairs in (plan.state_loads, plan.state_copies) for _, slot in pairs]
        written += [slot for chunk in plan.prefill for _, slot in chunk.saves]
        written += [slot_of(row) for row in (*plan.decode, *(chunk.row for chunk in plan.prefill))]
        for slot in written:
            self._kept[slot] = LOST, 0

"""Slots of recurrent states on the fake device. A slot keeps the identity of the prefix that was read."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.cache.snapshots import slot_of
from aengine.step_plan import StepPlan

LOST = -3  # content of a slot after a failed step, before the first write, or after a refused draft


@dataclass(frozen=True)
class _Slot:
    """The content of a slot: the prefix that was read, its length, and the era of the row that read it."""

    prefix: int = LOST
    tokens: int = 0
    era: int = 0


class FakeStates:
    """Moves states as plans say. A row that continues from another prefix than its own is found at once.

    With drafts, the slot of a decoding row contains the first token of its last step. The next step adds the drafts
    that were accepted.
    """

    def __init__(self, drafts: bool = False) -> None:
        self._drafts = drafts
        self._kept: dict[int, _Slot] = {}
        self._decoding: set[int] = set()  # rows that decode in the current step
        self._spans: dict[int, tuple[int, int]] = {}  # row -> lengths between which the current step may save its state

    def load(self, plan: StepPlan) -> None:
        """Begin a step: load snapshots for new rows, before the forward pass."""
        self._decoding = set(plan.decode)
        self._spans.clear()
        for source, destination in plan.state_loads:
            self._kept[destination] = self._kept.get(source, _Slot())

    def advance(
        self, row: int, path: list[int], start: int, end: int, era: int, broken: bool, refused: int = 0
    ) -> None:
        """Let a row read the tokens from `start` up to, without, `end`, and then refused drafts.

        path: the prefix that ends in each token.
        """
        kept = self._kept.get(slot_of(row), _Slot())
        tokens = start
        if start and not broken:
            if self._drafts and row in self._decoding:
                tokens = kept.tokens
                if not 0 < tokens <= start:
                    raise AssertionError(f"row {row} goes on at {start} with a state after {tokens} tokens")
            if kept.prefix != path[tokens - 1]:
                raise AssertionError(f"row {row} goes on at {start} with the state of another prefix: {kept.prefix}")
            if kept.era < era:
                raise AssertionError(f"row {row} goes on from what was there before the cache was flushed")
        self._spans[row] = tokens, end + refused
        read = start + 1 if self._drafts and row in self._decoding else end
        self._kept[slot_of(row)] = _Slot(LOST if broken else path[read - 1], read, era)

    def save(self, plan: StepPlan, rows: dict[int, tuple[list[int], int, int, bool]]) -> None:
        """Save states of chunks and of decoding rows. rows: path, length, era and whether it is broken, by row."""
        written = _written(plan)
        if len(written) != len(set(written)):
            raise AssertionError(f"a slot is written twice in one step: {written}")
        for chunk in plan.prefill:
            path, _, era, broken = rows[chunk.row]
            for count, slot in chunk.saves:
                tokens = chunk.start + count
                self._kept[slot] = _Slot(LOST if broken else path[tokens - 1], tokens, era)
        for row, tokens, slot in plan.state_saves:
            if row not in self._decoding or not self._drafts:
                raise AssertionError(f"row {row} does not decode with drafts")
            path, length, era, broken = rows[row]
            before, end = self._spans[row]
            if before < tokens <= end:
                refused = tokens > length
                self._kept[slot] = _Slot(LOST if broken or refused else path[tokens - 1], tokens, era)

    def copy(self, plan: StepPlan) -> None:
        """Copy states after the forward pass: for forks, and for snapshots of outputs."""
        for source, destination in plan.state_copies:
            self._kept[destination] = self._kept.get(source, _Slot())

    def fail(self, plan: StepPlan) -> None:
        """Mark all slots that a failed step may have written."""
        for slot in [*_written(plan), *(slot for pairs in (plan.state_loads, plan.state_copies) for _, slot in pairs)]:
            self._kept[slot] = _Slot()


def _written(plan: StepPlan) -> list[int]:
    """Return the slots that the forward pass of a step writes or may write."""
    written = [slot for chunk in plan.prefill for _, slot in chunk.saves]
    written += [slot for _, _, slot in plan.state_saves]
    return written + [slot_of(row) for row in (*plan.decode, *(chunk.row for chunk in plan.prefill))]

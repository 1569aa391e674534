"""Snapshots of recurrent states: sequences save them and continue from them."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from aengine.cache.radix import Node
from aengine.cache.snapshots import SnapshotRoom, Snapshots, slot_of
from aengine.scheduling.holding import Holding
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

_Saved = tuple[int, int]  # the tokens after which a snapshot was taken, and its slot


@dataclass(slots=True, eq=False)
class _States:
    """The snapshots of one sequence that are not in the tree. Those of steps in flight are after `computed` tokens."""

    source: int = 0  # slot of the snapshot that the sequence continues from; 0: none
    saved: list[_Saved] = field(default_factory=list)
    prefilled: int = 0  # tokens of all chunks so far
    planned: int = 0  # tokens of the last snapshot that was planned for the output; with drafts only


class SequenceSnapshots(Holding):
    """Takes snapshots at the ends of prompts, at the ends of shared prefixes, and at regular distances.

    A sequence holds a snapshot until its pages are in the tree. Then the tree holds the snapshot. Only the newest
    snapshot of an output is kept. If sequences hold all slots, no snapshot is taken.

    With drafts, it is not known at a launch which tokens the step will keep. So every step that may reach a position
    saves the state there into the same slot. The snapshot is valid when the sequence has computed that many tokens.
    """

    def __init__(self, room: SnapshotRoom, max_rows: int, page_size: int, drafts: bool) -> None:
        """drafts: whether rows verify drafts."""
        self.reusable = room.count > 0
        self._first_slot = slot_of(max_rows)
        self.slots = self.watcher = Snapshots(room, self._first_slot, page_size)
        self._grain = room.grain
        self._prompt_grain = room.prompt_grain
        self._page_size = page_size
        self._drafts = drafts
        self._states: dict[Sequence, _States] = {}

    # ---- admission ----------------------------------------------------------------------------------------

    def usable(self, cached: Seq[int]) -> int:
        return self.slots.deepest(cached)[0]

    def resume(self, sequence: Sequence, cached: Seq[int]) -> None:
        self._states[sequence] = _States(source=self.slots.deepest(cached)[1])

    def enter(self, sequence: Sequence, row: NewRow, plan: StepPlan) -> None:
        """Plan the copy of the snapshot into the row's slot. A sibling gets its leader's state instead (`fork`)."""
        source = self._states[sequence].source
        if source:
            plan.state_loads.append((source, slot_of(sequence.row)))

    # ---- running ------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, plan: StepPlan, chunk: PrefillChunk | None) -> None:
        if not self.reusable:
            return
        if chunk is not None:
            chunk.saves = self._in_chunk(sequence, chunk.start, chunk.start + len(chunk.token_ids))
        elif self._drafts:
            self._save_with_drafts(sequence, plan)
        elif not sequence.launched % self._grain:
            self._drop_older(sequence)
            if (slot := self.slots.take()) is not None:
                self._states[sequence].saved.append((sequence.launched, slot))
                plan.state_copies.append((slot_of(sequence.row), slot))

    def _save_with_drafts(self, sequence: Sequence, plan: StepPlan) -> None:
        """Plan the snapshots at all positions that the step may reach. Only tests have more than one in a step."""
        states, grain = self._states[sequence], self._grain
        known = max(sequence.computed, states.prefilled)
        for tokens in range(known // grain * grain + grain, sequence.launched + 1, grain):
            if tokens > states.planned:
                states.planned = tokens
                self._drop_older(sequence)
                if (slot := self.slots.take()) is not None:
                    states.saved.append((tokens, slot))
            plan.state_saves += [(sequence.row, tokens, slot) for at, slot in states.saved if at == tokens]

    def _in_chunk(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Take slots for the snapshots of a chunk. Returns them in the form of `PrefillChunk.saves`."""
        states, grain, every = self._states[sequence], self._grain, self._prompt_grain
        states.prefilled = end
        borders = set(range(start // every * every, end + 1, every))
        # The last token of a prompt is always computed, so no later request continues after it.
        borders.add((sequence.length - 1) // grain * grain)
        borders.add(sequence.shared_until // grain * grain)
        saves = []
        for tokens in sorted(borders):
            if start < tokens <= end and (slot := self.slots.take()) is not None:
                saves.append((tokens - start, slot))
                states.saved.append((tokens, slot))
        return saves

    def fork(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> None:
        self._states[sibling] = _States(prefilled=leader.launched)
        plan.state_copies.append((slot_of(leader.row), slot_of(sibling.row)))

    # ---- the tree -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, node: Node | None) -> None:
        if node is not None:
            self._file(sequence, node)

    def release(self, sequence: Sequence, node: Node | None) -> None:
        if node is not None:
            self._drop_older(sequence)
            self._file(sequence, node)
        for _, slot in self._states.pop(sequence).saved:
            self.slots.release(slot)

    def _drop_older(self, sequence: Sequence) -> None:
        """Free the computed snapshots of the output, except the newest one."""
        states = self._states[sequence]
        newest = max((tokens for tokens, _ in states.saved if tokens <= sequence.computed), default=0)
        kept = []
        for tokens, slot in states.saved:
            if sequence.prompt_len < tokens < newest:
                self.slots.release(slot)
            else:
                kept.append((tokens, slot))
        states.saved = kept

    def _file(self, sequence: Sequence, node: Node) -> None:
        """Give the computed snapshots on the path to `node` to the tree."""
        states, kept = self._states[sequence], []
        for tokens, slot in states.saved:
            depth = tokens // self._page_size
            if tokens <= sequence.computed and depth <= node.depth:
                self.slots.file(node, depth, slot)
            else:
                kept.append((tokens, slot))
        states.saved = kept

    # ---- figures and checks -------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        slots = self.slots
        return {
            "state_snapshots": slots.room.count,
            "state_snapshots_used": slots.room.count - slots.free,
            "state_snapshot_evictions": slots.evictions,
        }

    def check_integrity(self, holders: Collection[Sequence], cached: set[int]) -> None:
        _require(self._states.keys() == set(holders), "a sequence without a row has snapshots, or one with a row none")
        owned = [slot for states in self._states.values() for _, slot in states.saved]
        for sequence, states in self._states.items():
            _require(
                all(tokens <= max(sequence.launched, states.planned) for tokens, _ in states.saved),
                "a snapshot is after the launched tokens",
            )
        self.slots.check_integrity(self._first_slot, owned, cached)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"snapshots: {message}")

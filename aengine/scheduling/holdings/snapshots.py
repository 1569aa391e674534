"""Where sequences take snapshots of their states, and which they go on from."""

from __future__ import annotations

from aengine.cache.radix import Node
from aengine.cache.snapshots import SnapshotRoom, Snapshots, slot_of
from aengine.scheduling.sequence import Sequence


class SequenceSnapshots:
    """Takes snapshots behind prompts, behind what several prompts begin with, and every so many tokens.

    A sequence holds those that it took until its pages are in the tree, which then has them. Of an output it keeps the
    newest one alone. Where all slots are taken by sequences none is taken.
    """

    def __init__(self, room: SnapshotRoom, first_slot: int, page_size: int) -> None:
        self.first_slot = first_slot
        self.slots = Snapshots(room, first_slot, page_size)
        self._grain = room.grain
        self._prompt_grain = room.prompt_grain
        self._page_size = page_size

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.slots.room.count > 0

    def resume(self, sequence: Sequence, cached: list[int]) -> int:
        """Let the sequence go on from the deepest snapshot of the pages that it found: of how many of them that is."""
        depth, sequence.resumes_from = self.slots.deepest(cached)
        return depth

    def in_chunk(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Snapshots to be taken in a chunk, as `PrefillChunk.saves` has them."""
        grain = self._grain
        every = self._prompt_grain
        borders = set(range(start // every * every, end + 1, every))
        # The last token of a prompt is computed in any case, so that no hit can be beyond it.
        borders.add((sequence.length - 1) // grain * grain)
        borders.add(sequence.shared_until // grain * grain)
        saves = []
        for tokens in sorted(borders):
            if start < tokens <= end and (slot := self.slots.take()) is not None:
                saves.append((tokens - start, slot))
                sequence.snapshots.append((tokens, slot))
        return saves

    def after_decode(self, sequence: Sequence) -> list[tuple[int, int]]:
        """Copies, (source, destination) each, for the decode that was just planned."""
        if sequence.launched % self._grain:
            return []
        self.drop_older(sequence)
        taken = self.slots.take()
        if taken is None:
            return []
        sequence.snapshots.append((sequence.launched, taken))
        return [(slot_of(sequence.row), taken)]

    def drop_older(self, sequence: Sequence) -> None:
        """Take back all snapshots of the output but the newest one of those that were computed."""
        newest = max((tokens for tokens, _ in sequence.snapshots if tokens <= sequence.computed), default=0)
        kept = []
        for tokens, slot in sequence.snapshots:
            if sequence.prompt_len < tokens < newest:
                self.slots.release(slot)
            else:
                kept.append((tokens, slot))
        sequence.snapshots = kept

    def file(self, sequence: Sequence, node: Node) -> None:
        """Give the tree what the sequence has computed, as far as the way to `node` goes, which has its tokens."""
        kept = []
        for tokens, slot in sequence.snapshots:
            depth = tokens // self._page_size
            if tokens <= sequence.computed and depth <= node.depth:
                self.slots.file(node, depth, slot)
            else:
                kept.append((tokens, slot))
        sequence.snapshots = kept

    def release(self, sequence: Sequence) -> None:
        """Take back what the sequence still has."""
        for _, slot in sequence.snapshots:
            self.slots.release(slot)
        sequence.snapshots = []

"""The waiting queue: a heap ordered by rank, with O(1) lazy removal."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from aengine.scheduling.sequence import Sequence


class WaitingQueue:
    """Smallest rank first. A removed sequence is dropped when it surfaces.

    The rank is `(arrival + priority * aging, ticket)`: everyone ages alike, so the key never changes,
    and a lower priority is overtaken only by what arrives within `aging` seconds per level.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._queued: set[Sequence] = set()
        self._aside: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._queued) + len(self._aside)

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no order."""
        return iter((*self._queued, *self._aside))

    def push(self, sequence: Sequence) -> None:
        self._queued.add(sequence)
        heapq.heappush(self._heap, (*sequence.rank, sequence.index, sequence))

    def head(self) -> Sequence | None:
        """The next one to admit, left in place."""
        while self._heap:
            sequence = self._heap[0][3]
            if sequence in self._queued:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return the head; there must be one."""
        sequence = self.head()
        if sequence is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        self._queued.discard(sequence)
        return sequence

    def set_aside(self, sequence: Sequence) -> None:
        """Let others overtake a sequence, which still counts as waiting, until it is put back."""
        self.remove(sequence)
        self._aside.add(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Undo `set_aside`; nothing happens if the sequence was removed meanwhile."""
        if sequence in self._aside:
            self._aside.discard(sequence)
            self.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; nothing happens if it is not queued."""
        self._aside.discard(sequence)
        self._queued.discard(sequence)
        if len(self._heap) > 2 * len(self._queued) + 64:  # amortised: the heap stays within twice its live part
            self._heap = [entry for entry in self._heap if entry[3] in self._queued]
            heapq.heapify(self._heap)

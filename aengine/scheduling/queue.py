"""The waiting queue: a heap ordered by rank. Removal is lazy and O(1)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from typing import Protocol

from aengine.scheduling.sequence import Sequence


class Queue(Protocol):
    """Decides which waiting sequence is admitted next."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences, in no order."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def head(self) -> Sequence | None:
        """Return the next sequence to admit, and leave it in the queue."""
        ...

    def pop(self) -> Sequence:
        """Remove and return the head. Raises `IndexError` if there is none."""
        ...

    def park(self, sequence: Sequence) -> None:
        """Skip a sequence until `unpark`. It still counts as waiting."""
        ...

    def unpark(self, sequence: Sequence) -> None:
        """Undo `park`. Does nothing if the sequence was removed meanwhile."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Does nothing if it is not queued."""
        ...

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        """Raise `AssertionError` if the queue contradicts itself. holders: the sequences that have rows."""
        ...


class WaitingQueue:
    """Orders sequences by rank, the smallest first. A removed sequence stays in the heap until it reaches the top.

    The rank is `(arrival + priority * aging, ticket)`, so it never changes. A request overtakes an earlier one of lower
    priority only if it arrives at most `aging` seconds later for each level of priority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Sequence]] = []
        self._queued: set[Sequence] = set()
        self._parked: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._queued) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        return iter((*self._queued, *self._parked))

    def push(self, sequence: Sequence) -> None:
        self._queued.add(sequence)
        heapq.heappush(self._heap, (*sequence.rank, sequence.index, sequence))

    def head(self) -> Sequence | None:
        while self._heap:
            sequence = self._heap[0][3]
            if sequence in self._queued:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        sequence = self.head()
        if sequence is None:
            raise IndexError("the waiting queue is empty")
        heapq.heappop(self._heap)
        self._queued.discard(sequence)
        return sequence

    def park(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._parked.add(sequence)

    def unpark(self, sequence: Sequence) -> None:
        if sequence in self._parked:
            self._parked.discard(sequence)
            self.push(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._parked.discard(sequence)
        self._queued.discard(sequence)
        if len(self._heap) > 2 * len(self._queued) + 64:  # amortised: at most half of a large heap is removed entries
            self._heap = [entry for entry in self._heap if entry[3] in self._queued]
            heapq.heapify(self._heap)

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        if not self._queued.isdisjoint(self._parked) or not (self._queued | self._parked).isdisjoint(holders):
            raise AssertionError("queue: a sequence is queued and parked at once, or waits and runs")

"""The waiting queue of an engine with adapters: which sequence enters, which adapter is loaded or evicted next."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from aengine.scheduling.queue import WaitingQueue
from aengine.scheduling.sequence import LoadedAdapter, Sequence

_Key = tuple[float, int, int]  # smallest first


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """An adapter on its way to a place. No row uses the place until the weights have arrived."""

    adapter: LoadedAdapter
    place: int


class AdapterQueue:
    """A `Queue` whose head is the smallest rank among sequences whose adapter is on the device, or that have none.

    A sequence that waits for an adapter does not delay others. Adapters are loaded in the order of their first waiting
    sequences, long before there is a row for these. To make room, the least recently used adapter without rows and
    without waiting sequences is evicted. If there is none, an adapter without rows whose first waiting sequence has a
    larger rank is evicted.

    If rows use every place, places are claimed, least recently used first: one for each adapter that is awaited. A
    claimed place is shut after as many rows have left it as it had when it was claimed. Before that, other sequences
    may still join the adapter, which hardly delays the waiting one. After that, only sequences with a smaller rank may.
    So a popular adapter is evicted after the duration of two outputs at most, and is loaded again by rank.
    """

    def __init__(self, places: int, most_loads: int = 1) -> None:
        """places: of the device, numbered from 1. most_loads: the most loads that run at once."""
        self.places = places
        self._most_loads = most_loads
        self.loads = 0  # begun so far
        self.evictions = 0
        self._plain = WaitingQueue()  # sequences without an adapter
        self._queues: dict[LoadedAdapter, WaitingQueue] = {}  # none of them empty
        self._empty = list(range(places, 0, -1))
        self._resident: OrderedDict[LoadedAdapter, None] = (
            OrderedDict()
        )  # or being loaded; the least recently used first
        self._coming: set[LoadedAdapter] = set()
        self._claimed: list[LoadedAdapter] = []
        self._ahead: dict[LoadedAdapter, None] = {}  # to load without a waiting sequence, if a place is empty
        # Awaited adapters without a place, by the key of their first waiting sequence. It may have left since.
        self._absent: list[tuple[_Key, int, LoadedAdapter]] = []
        self._entries = itertools.count()

    # ---- for the scheduler: a waiting queue -----------------------------------------------------------

    def __len__(self) -> int:
        return len(self._plain) + sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._plain
        for queue in self._queues.values():
            yield from queue

    def push(self, sequence: Sequence) -> None:
        adapter = sequence.adapter
        if adapter is None:
            self._plain.push(sequence)
            return
        queue = self._queues.get(adapter)
        if queue is None:
            queue = self._queues[adapter] = WaitingQueue()
        queue.push(sequence)
        if not adapter.place and queue.head() is sequence:
            self._await(adapter, sequence)

    def head(self) -> Sequence | None:
        best = self._plain.head()
        if not self._queues:
            return best
        first = self._first_absent()
        for adapter in self._resident:
            head = self._head_of(adapter)
            if head is None or not adapter.ready or (best is not None and _key(best) < _key(head)):
                continue
            if adapter.until_shut == 0 and first is not None and _key(first) < _key(head):
                continue
            best = head
        return best

    def pop(self) -> Sequence:
        sequence = self.head()
        if sequence is None:
            raise IndexError("no sequence may enter")
        if sequence.adapter is not None:
            self._resident.move_to_end(sequence.adapter)
        self.remove(sequence)
        return sequence

    def park(self, sequence: Sequence) -> None:
        queue = self._plain if sequence.adapter is None else self._queues[sequence.adapter]
        queue.park(sequence)

    def unpark(self, sequence: Sequence) -> None:
        adapter = sequence.adapter
        queue = self._plain if adapter is None else self._queues.get(adapter)
        if queue is not None:
            queue.unpark(sequence)
            if adapter is not None and not adapter.place and queue.head() is sequence:
                self._await(adapter, sequence)

    def remove(self, sequence: Sequence) -> None:
        adapter = sequence.adapter
        queue = self._plain if adapter is None else self._queues.get(adapter)
        if queue is not None:
            queue.remove(sequence)
            if adapter is not None and not queue:
                del self._queues[adapter]

    @property
    def awaited(self) -> bool:
        """Whether a load may be due; cheap, without a search."""
        return bool(self._absent or self._ahead)

    @property
    def resident(self) -> Collection[LoadedAdapter]:
        """The adapters that have a place, including those being loaded; the least recently used first."""
        return self._resident.keys()

    # ---- for the engine: loads -------------------------------------------------------------

    def bring_ahead(self, adapter: LoadedAdapter) -> None:
        """Load an adapter as soon as a place is empty, although no sequence waits for it yet."""
        self._ahead[adapter] = None

    def next_load(self) -> Load | None:
        """Begin the next load that is due and has a place. End it with `finish_load` or `fail_load`."""
        if len(self._coming) >= self._most_loads:
            return None
        first = self._first_absent()
        if first is None:
            self._reopen()
            return self._next_ahead()
        adapter = first.adapter
        if adapter is None or not (self._empty or self._make_room(_key(first))):
            return None
        return self._begin(adapter)

    def finish_load(self, load: Load) -> None:
        """Note that the weights are in the place. Every step planned from now on may name it."""
        self._coming.discard(load.adapter)
        load.adapter.ready = True

    def fail_load(self, load: Load) -> list[Sequence]:
        """Note that a load failed, which empties the place. Returns the sequences that wait for the adapter."""
        self._coming.discard(load.adapter)
        self._vacate(load.adapter)
        return list(self._queues.get(load.adapter, ()))

    def waiting_for(self, adapter: LoadedAdapter) -> int:
        """Return the number of waiting sequences that have the adapter."""
        return len(self._queues.get(adapter, ()))

    def forget(self, adapter: LoadedAdapter) -> bool:
        """Free an adapter's place unless a sequence has the adapter or it is being loaded.

        Returns whether it is gone.
        """
        if adapter.rows or adapter in self._queues or adapter in self._coming:
            return False
        self._ahead.pop(adapter, None)
        if adapter.place:
            self._vacate(adapter)
        return True

    # ---- room -----------------------------------------------------------------------------------------------

    def _make_room(self, key: _Key) -> bool:
        """Empty a place for the adapter whose first sequence has the key. If none can be emptied, claim places."""
        last: LoadedAdapter | None = None
        last_key = key
        for adapter in self._resident:
            if adapter.rows or not adapter.ready:
                continue
            head = self._head_of(adapter)
            if head is None:
                last = adapter
                break
            if _key(head) > last_key:
                last, last_key = adapter, _key(head)
        if last is None:
            self._claim()
            return False
        self._vacate(last)
        self.evictions += 1
        return True

    def _claim(self) -> None:
        """Claim one place for each awaited adapter without a place."""
        awaited = sum(not adapter.place for adapter in self._queues)
        for adapter in self._resident:
            if len(self._claimed) >= awaited:
                return
            if adapter.rows and adapter.until_shut is None:
                adapter.until_shut = adapter.rows
                self._claimed.append(adapter)

    def _reopen(self) -> None:
        """Give up all claims: no adapter waits for a place any more."""
        while self._claimed:
            self._claimed.pop().until_shut = None

    def _vacate(self, adapter: LoadedAdapter) -> None:
        self._empty.append(adapter.place)
        adapter.place, adapter.ready = 0, False
        del self._resident[adapter]
        if adapter.until_shut is not None:
            adapter.until_shut = None
            self._claimed.remove(adapter)
        if (head := self._head_of(adapter)) is not None:
            self._await(adapter, head)

    # ---- the next load ------------------------------------------------------------------------------------

    def _next_ahead(self) -> Load | None:
        while self._ahead and self._empty:
            adapter = next(iter(self._ahead))
            del self._ahead[adapter]
            if not adapter.place:
                return self._begin(adapter)
        return None

    def _begin(self, adapter: LoadedAdapter) -> Load:
        adapter.place = self._empty.pop()
        self._resident[adapter] = None
        self._coming.add(adapter)
        self.loads += 1
        return Load(adapter, adapter.place)

    def _await(self, adapter: LoadedAdapter, head: Sequence) -> None:
        heapq.heappush(self._absent, (_key(head), next(self._entries), adapter))

    def _first_absent(self) -> Sequence | None:
        """Return the sequence of the smallest rank among those whose adapter has no place."""
        while self._absent:
            key, entry, adapter = self._absent[0]
            head = None if adapter.place else self._head_of(adapter)
            if head is None:
                heapq.heappop(self._absent)
            elif _key(head) != key:
                heapq.heapreplace(self._absent, (_key(head), entry, adapter))
            else:
                return head
        return None

    def _head_of(self, adapter: LoadedAdapter) -> Sequence | None:
        queue = self._queues.get(adapter)
        return None if queue is None else queue.head()

    # ---- figures and checks ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the fields of `Stats` about adapters."""
        return {"adapter_places": self.places, "adapter_loads": self.loads, "adapter_evictions": self.evictions}

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        """Raise `AssertionError` unless places, rows and queues add up."""
        rows = Counter(sequence.adapter for sequence in holders if sequence.adapter is not None)
        places = [*(adapter.place for adapter in self._resident), *self._empty]
        _require(sorted(places) == list(range(1, self.places + 1)), f"places are shared or lost: {places}")
        _require(self._coming <= self._resident.keys(), "an adapter is on its way to no place")
        _require(rows.keys() <= self._resident.keys(), "a row has an adapter that is not on the device")
        for adapter in {*self._resident, *self._queues, *rows}:
            _require(bool(adapter.place) == (adapter in self._resident), "an adapter is wrong about its place")
            _require(
                adapter.ready == (bool(adapter.place) and adapter not in self._coming),
                "an adapter is wrong about being ready",
            )
            _require(adapter.rows == rows[adapter], f"{rows[adapter]} rows have an adapter, not {adapter.rows}")
            _require(
                (adapter.until_shut is not None) == (adapter in self._claimed),
                "a claimed place is not in the list of claims",
            )
            _require(adapter.ready or not adapter.rows, "a row has an adapter that is still on its way")
        for adapter, queue in self._queues.items():
            _require(len(queue) > 0, "an adapter without waiting sequences has a queue")
            entries = [key for key, _, absent in self._absent if absent is adapter]
            head = queue.head()
            if not adapter.place and head is not None:
                _require(bool(entries) and min(entries) <= _key(head), "an awaited adapter will never be loaded")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"adapters: {message}")


def _key(sequence: Sequence) -> _Key:
    return (*sequence.rank, sequence.index)

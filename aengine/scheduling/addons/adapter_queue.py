"""The waiting queue of an engine with adapters. It also decides which adapter is loaded or evicted next."""

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
class AdapterLoad:
    """A load of an adapter into a place. No row uses the place until the load has ended."""

    adapter: LoadedAdapter
    place: int


class AdapterQueue:
    """A `Queue` that skips sequences whose adapter is not on the device. Its head has the smallest rank of the others.

    A sequence that waits for an adapter does not delay others. Adapters are loaded in the order of their first waiting
    sequences, before these have a row. To empty a place, the least recently used adapter without rows and
    without waiting sequences is evicted. If there is none, an adapter without rows whose first waiting sequence has a
    larger rank is evicted.

    If rows use every place, places are claimed, least recently used first: one for each awaited adapter. A claimed
    place is shut after as many rows have left it as used it when it was claimed. Until then, sequences of its adapter
    may still enter, which hardly delays the waiting one. A sequence may enter a shut place only if its rank is smaller
    than the rank of the first waiting sequence without a place. So a popular adapter is evicted after the duration of
    two outputs at most, and is loaded again in order of rank.
    """

    def __init__(self, places: int) -> None:
        """places: how many adapters fit on the device; numbered from 1."""
        self.places = places
        self.loads = 0  # number of loads that have begun
        self.evictions = 0
        self._plain = WaitingQueue()  # sequences without an adapter
        self._queues: dict[LoadedAdapter, WaitingQueue] = {}  # none of them empty
        self._empty = list(range(places, 0, -1))
        # The adapters that have a place, including those being loaded; the least recently used first.
        self._resident: OrderedDict[LoadedAdapter, None] = OrderedDict()
        self._loading: LoadedAdapter | None = None  # one at a time
        self._claimed: list[LoadedAdapter] = []
        # Adapters to load if a place is empty, although no sequence waits for them.
        self._preloads: dict[LoadedAdapter, None] = {}
        # A heap of awaited adapters without a place: key of the first waiting sequence, tie-breaker, adapter. Entries
        # are checked when they are read, because the sequence may have left meanwhile.
        self._absent: list[tuple[_Key, int, LoadedAdapter]] = []
        self._tie_breaker = itertools.count()

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
        """Whether a load may be due. Cheap, because it does not search."""
        return bool(self._absent or self._preloads)

    # ---- for the engine: loads -------------------------------------------------------------

    def preload(self, adapter: LoadedAdapter) -> None:
        """Load an adapter as soon as a place is empty, although no sequence waits for it yet."""
        self._preloads[adapter] = None

    def next_load(self) -> AdapterLoad | None:
        """Begin the next load that is due and return it, or None. End it with `finish_load` or `fail_load`."""
        if self._loading is not None:
            return None
        first = self._first_absent()
        if first is None:
            self._reopen()
            return self._next_preload()
        adapter = first.adapter
        if adapter is None or not (self._empty or self._evict(_key(first))):
            return None
        return self._begin(adapter)

    def finish_load(self, load: AdapterLoad) -> None:
        """Note that the weights are on the device. Steps that are planned from now on may name the place."""
        self._loading = None
        load.adapter.ready = True

    def fail_load(self, load: AdapterLoad) -> list[Sequence]:
        """Note that a load failed, and empty the place. Returns the sequences that wait for the adapter."""
        self._loading = None
        self._vacate(load.adapter)
        return list(self._queues.get(load.adapter, ()))

    def waiting_for(self, adapter: LoadedAdapter) -> int:
        """Return the number of waiting sequences that have the adapter."""
        return len(self._queues.get(adapter, ()))

    def forget(self, adapter: LoadedAdapter) -> bool:
        """Remove an adapter, unless a sequence uses it or it is being loaded.

        Returns whether it was removed.
        """
        if adapter.rows or adapter in self._queues or adapter is self._loading:
            return False
        self._preloads.pop(adapter, None)
        if adapter.place:
            self._vacate(adapter)
        return True

    # ---- eviction -------------------------------------------------------------------------------------------

    def _evict(self, key: _Key) -> bool:
        """Evict an adapter for the sequence with this key. If none can be evicted, claim places and return False."""
        victim: LoadedAdapter | None = None
        victim_key = key
        for adapter in self._resident:
            if adapter.rows or not adapter.ready:
                continue
            head = self._head_of(adapter)
            if head is None:
                victim = adapter
                break
            if _key(head) > victim_key:
                victim, victim_key = adapter, _key(head)
        if victim is None:
            self._claim()
            return False
        self._vacate(victim)
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
        """Cancel all claims, because no adapter waits for a place."""
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

    def _next_preload(self) -> AdapterLoad | None:
        while self._preloads and self._empty:
            adapter = next(iter(self._preloads))
            del self._preloads[adapter]
            if not adapter.place:
                return self._begin(adapter)
        return None

    def _begin(self, adapter: LoadedAdapter) -> AdapterLoad:
        adapter.place = self._empty.pop()
        self._resident[adapter] = None
        self._loading = adapter
        self.loads += 1
        return AdapterLoad(adapter, adapter.place)

    def _await(self, adapter: LoadedAdapter, head: Sequence) -> None:
        heapq.heappush(self._absent, (_key(head), next(self._tie_breaker), adapter))

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
        loading = self._loading
        _require(loading is None or loading in self._resident, "an adapter is being loaded without a place")
        _require(rows.keys() <= self._resident.keys(), "a row has an adapter that is not on the device")
        for adapter in {*self._resident, *self._queues, *rows}:
            _require(
                bool(adapter.place) == (adapter in self._resident),
                "an adapter's place disagrees with the list of resident adapters",
            )
            _require(
                adapter.ready == (bool(adapter.place) and adapter is not loading),
                "an adapter is ready while it is being loaded, or not ready after it",
            )
            _require(adapter.rows == rows[adapter], f"{rows[adapter]} rows have an adapter, not {adapter.rows}")
            _require(
                (adapter.until_shut is not None) == (adapter in self._claimed),
                "a claimed place is not in the list of claims",
            )
            _require(adapter.ready or not adapter.rows, "a row has an adapter that is still being loaded")
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

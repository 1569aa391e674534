"""The waiting queue where sequences have adapters: who may enter, which adapter comes to the device next, which one
makes room.
"""

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
    """A `WaitingQueue` whose head is the smallest rank among those whose adapter is on the device, or who have none.

    Whoever waits for an adapter holds up nobody. Adapters are brought in by the rank of the first one that waits for
    each, long before there is a row for it. Room is made by the least recently used adapter that no row uses and nobody
    waits for; else by one that no row uses, and whose first waiting sequence ranks behind.

    Where rows use every place, as many places as adapters are awaited are claimed, least recently used first. A claimed
    place is shut once as many of its rows have come free as were held when it was claimed: until then others may join
    them, which costs the one that waits next to nothing, afterwards only who ranks before it. So a popular adapter
    gives way after two outputs' time at most, however many requests come for it; and it has its turn again by rank.
    """

    def __init__(self, places: int, most_loads: int = 1) -> None:
        """places: the device's, numbered from 1; most_loads: at once."""
        self.places = places
        self._most_loads = most_loads
        self.loads = 0  # begun so far
        self.evictions = 0
        self._plain = WaitingQueue()  # those without an adapter
        self._queues: dict[LoadedAdapter, WaitingQueue] = {}  # none of them empty
        self._empty = list(range(places, 0, -1))
        self._resident: OrderedDict[LoadedAdapter, None] = OrderedDict()  # or coming; the least recently used first
        self._coming: set[LoadedAdapter] = set()
        self._claimed: list[LoadedAdapter] = []
        self._ahead: dict[LoadedAdapter, None] = {}  # nobody waits for them yet
        # Adapters that have no place and are awaited, by the key of the first who waits, or of one who has left since.
        self._absent: list[tuple[_Key, int, LoadedAdapter]] = []
        self._entries = itertools.count()

    # ---- what the scheduler sees: a waiting queue -----------------------------------------------------------

    def __len__(self) -> int:
        return len(self._plain) + sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no order."""
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
        """The next one to admit, left in place."""
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
        """Remove and return the head; there must be one."""
        sequence = self.head()
        if sequence is None:
            raise IndexError("nobody may enter")
        if sequence.adapter is not None:
            self._resident.move_to_end(sequence.adapter)
        self.remove(sequence)
        return sequence

    def park(self, sequence: Sequence) -> None:
        """Let others overtake a sequence, which still counts as waiting, until it is put back."""
        queue = self._plain if sequence.adapter is None else self._queues[sequence.adapter]
        queue.park(sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Undo `park`; nothing happens if the sequence was removed meanwhile."""
        adapter = sequence.adapter
        queue = self._plain if adapter is None else self._queues.get(adapter)
        if queue is not None:
            queue.unpark(sequence)
            if adapter is not None and not adapter.place and queue.head() is sequence:
                self._await(adapter, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence; nothing happens if it is not queued."""
        adapter = sequence.adapter
        queue = self._plain if adapter is None else self._queues.get(adapter)
        if queue is not None:
            queue.remove(sequence)
            if adapter is not None and not queue:
                del self._queues[adapter]

    @property
    def awaited(self) -> bool:
        """Whether a load may be due, as far as that can be told without looking."""
        return bool(self._absent or self._ahead)

    @property
    def resident(self) -> Collection[LoadedAdapter]:
        """The adapters that have a place, those on their way included; the least recently used first."""
        return self._resident.keys()

    # ---- what the engine sees: loads to be made -------------------------------------------------------------

    def bring_ahead(self, adapter: LoadedAdapter) -> None:
        """Let an adapter, which nobody waits for yet, come to the device as soon as a place is empty."""
        self._ahead[adapter] = None

    def next_load(self) -> Load | None:
        """Begin the next load that is due and has a place. It is over with `arrived` or `failed`."""
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

    def arrived(self, load: Load) -> None:
        """The weights lie in the place: every step planned from now on may name it."""
        self._coming.discard(load.adapter)
        load.adapter.ready = True

    def failed(self, load: Load) -> list[Sequence]:
        """The weights could not be brought in: the place is empty again. Returns those who wait for the adapter, and
        should wait no longer.
        """
        self._coming.discard(load.adapter)
        self._vacate(load.adapter)
        return list(self._queues.get(load.adapter, ()))

    def waiting_for(self, adapter: LoadedAdapter) -> int:
        """The number of sequences in the queue that have the adapter."""
        return len(self._queues.get(adapter, ()))

    def forget(self, adapter: LoadedAdapter) -> bool:
        """Give an adapter's place back unless a sequence has the adapter or it is on its way; whether it is gone."""
        if adapter.rows or adapter in self._queues or adapter in self._coming:
            return False
        self._ahead.pop(adapter, None)
        if adapter.place:
            self._vacate(adapter)
        return True

    # ---- room -----------------------------------------------------------------------------------------------

    def _make_room(self, key: _Key) -> bool:
        """Empty a place for the adapter whose first sequence has the key; where none can be emptied, claim some."""
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
        """Claim as many places as adapters are awaited that have none."""
        awaited = sum(not adapter.place for adapter in self._queues)
        for adapter in self._resident:
            if len(self._claimed) >= awaited:
                return
            if adapter.rows and adapter.until_shut is None:
                adapter.until_shut = adapter.rows
                self._claimed.append(adapter)

    def _reopen(self) -> None:
        """Nobody waits for a place any more."""
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

    # ---- what comes next ------------------------------------------------------------------------------------

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
        """Of those whose adapter has no place, the one of the smallest rank."""
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
        """Raise `AssertionError` unless places, rows and queues add up; `holders` are the sequences that have rows."""
        rows = Counter(sequence.adapter for sequence in holders if sequence.adapter is not None)
        places = [*(adapter.place for adapter in self._resident), *self._empty]
        _require(sorted(places) == list(range(1, self.places + 1)), f"places are shared or lost: {places}")
        _require(self._coming <= self._resident.keys(), "an adapter is on its way to no place")
        _require(rows.keys() <= self._resident.keys(), "a row has an adapter that is not on the device")
        for adapter in {*self._resident, *self._queues, *rows}:
            _require(bool(adapter.place) == (adapter in self._resident), "an adapter is wrong about its place")
            _require(adapter.ready == (bool(adapter.place) and adapter not in self._coming), "an adapter is half there")
            _require(adapter.rows == rows[adapter], f"{rows[adapter]} rows have an adapter, not {adapter.rows}")
            _require((adapter.until_shut is not None) == (adapter in self._claimed), "a claim is unknown")
            _require(adapter.ready or not adapter.rows, "a row has an adapter that is still on its way")
        for adapter, queue in self._queues.items():
            _require(len(queue) > 0, "an adapter that nobody waits for has a queue")
            entries = [key for key, _, absent in self._absent if absent is adapter]
            head = queue.head()
            if not adapter.place and head is not None:
                _require(bool(entries) and min(entries) <= _key(head), "an adapter is awaited, and will never come")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"adapters: {message}")


def _key(sequence: Sequence) -> _Key:
    return (*sequence.rank, sequence.index)

"""Sequences parked while their KV pages are loaded from a lower tier."""

from __future__ import annotations

from aengine.cache.tiers.tiers import Arrival, Load, Tiers
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.queue import Queue
from aengine.scheduling.sequence import Sequence


class Loading:
    """Begins loads for sequences that are about to be admitted, and inserts the loaded pages into the tree.

    A load goes on if the sequences that wait for it are aborted. Its pages are cached in any case.
    """

    def __init__(self, memory: SequenceMemory, tiers: Tiers, queue: Queue) -> None:
        self.tiers = tiers
        self._memory = memory
        self._queue = queue
        self._waiting: dict[Load, list[Sequence]] = {}

    @property
    def busy(self) -> bool:
        """Whether a load is running."""
        return bool(self._waiting)

    @property
    def pages(self) -> list[int]:
        """The pages of the pool that are being filled."""
        return [page for load in self._waiting for page in load.pages]

    def begin(self, sequence: Sequence, headroom: int) -> bool:
        """Park a sequence, the head of the queue, if a lower tier has pages of it. Returns whether it was parked.

        Pages of the pool are taken under the same conditions as in `SequenceMemory.admit`. If there are not enough, the
        sequence is not parked. The tiers are searched for a sequence once, and again after each preemption.
        """
        memory, tree = self._memory, self._memory.tree
        if (
            sequence.tiers_searched
            or sequence.needs_all_tokens
            or not memory.prefix_cache
            or memory.refuses(sequence, headroom)
        ):
            return False
        ids = sequence.keys(0, sequence.length - 1)
        node = tree.match(ids, sequence.salt).node
        found = self.tiers.find(node, ids, sequence.salt)
        if found is None:
            sequence.tiers_searched = True
            return False
        load = self.tiers.running_load(found)
        if load is None:
            sequence.tiers_searched = True
            available = memory.available
            tree.lock(node)
            needed = memory.pages_for(sequence.length) - node.depth + available - memory.available
            if needed + headroom > available:
                sequence.tiers_searched = False
            else:
                memory.reserve_pages(len(found.keys))
                pages = memory.allocator.take(len(found.keys))
                load = self.tiers.begin_load(found, node, ids, sequence.salt, pages)
                for page in pages if load is None else pages[len(load.keys) :]:
                    memory.allocator.release(page)
            if load is None:
                tree.unlock(node)
                return False
            del load.pages[len(load.keys) :]
            self._waiting[load] = []
        self._waiting[load].append(sequence)
        self._queue.park(sequence)
        return True

    def end(self, load: Load, arrival: Arrival) -> None:
        """Insert the pages of a finished load into the tree, and unpark the sequences that wait for it."""
        self.tiers.end_load(load, arrival)
        arrived = arrival.pages
        memory, tree = self._memory, self._memory.tree
        size = memory.page_size
        taken = [False] * len(load.pages)
        if load.epoch == tree.epoch and arrived:
            inserted = tree.insert(load.token_ids[: arrived * size], load.pages[:arrived], load.salt, load.node)
            taken[:arrived] = inserted.taken
        else:
            arrived = 0
        for page, is_taken in zip(load.pages, taken, strict=True):
            if not is_taken:
                memory.allocator.release(page)
        tree.unlock(load.node)
        read = sum(i < arrived for i, _, _ in load.reads)
        for sequence in self._waiting.pop(load):
            sequence.from_disk += read * size
            sequence.from_host += (arrived - read) * size
            self._queue.unpark(sequence)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the loads are those of the tiers, whose integrity is checked too."""
        self.tiers.check_integrity()
        if set(self._waiting) != set(self.tiers.loading):
            raise AssertionError("loading: the tiers have other loads than the sequences wait for")

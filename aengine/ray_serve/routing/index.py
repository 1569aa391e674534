"""Maps the keys of prefixes to the replicas that have them cached, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_NONE: list[int] = []
_KEYS, _KEYS_EACH, _MOST_KEYS = 2**20, 2**12, 2**23


class PrefixIndex:
    """Maps keys to the replicas that hold them. A replica is named by its slot, a small number.

    Each slot keeps its keys in the order of their last use. Among the keys of one prompt, the deepest counts as the
    oldest, as in the radix tree. The oldest keys beyond the slot's share of `max_keys` are dropped. A slot that holds a
    key therefore holds the keys before it in the chain, unless the replica evicted them out of order.
    """

    def __init__(self, max_keys: int | None = None) -> None:
        """max_keys: bound over all slots; None means 4,096 for each slot, and from 2**20 to 2**23 in total."""
        self._max_keys = max_keys
        # key -> its slots. Nearly all keys have one slot, which is stored without a list: millions of lists would make
        # garbage collections slow, and each lookup one more access to memory.
        self._holders: dict[int, int | list[int]] = {}
        self._kept: dict[int, OrderedDict[int, None]] = {}  # slot -> its keys, least recently used first

    def __len__(self) -> int:
        """Return the number of (slot, key) pairs."""
        return sum(map(len, self._kept.values()))

    def join(self, slot: int) -> None:
        """Add a slot without keys."""
        self._kept[slot] = OrderedDict()

    def leave(self, slot: int) -> None:
        """Remove a slot and its keys."""
        self.clear(slot)
        del self._kept[slot]

    def clear(self, slot: int) -> None:
        """Remove all keys of a slot."""
        for key in self._kept[slot]:
            self._drop(slot, key)
        self._kept[slot].clear()

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """Add a chain of keys to a slot, as its most recently used ones."""
        kept, holders = self._kept[slot], self._holders
        for key in reversed(keys):
            if key in kept:
                kept.move_to_end(key)
            else:
                kept[key] = None
                others = holders.get(key)
                if others is None:
                    holders[key] = slot
                elif isinstance(others, int):
                    holders[key] = [others, slot]
                else:
                    others.append(slot)
        share = self._share()
        while len(kept) > share:
            self._drop(slot, kept.popitem(last=False)[0])

    def holds(self, slot: int, key: int) -> bool:
        """Return whether a slot holds a key."""
        return key in self._kept[slot]

    def forget(self, slot: int, key: int) -> None:
        """Remove a key from a slot; nothing happens if the slot does not hold it."""
        kept = self._kept[slot]
        if key in kept:
            del kept[key]
            self._drop(slot, key)

    def holders(self, key: int) -> list[int]:
        """Return the slots that hold a key. The caller must not change the list."""
        slots = self._holders.get(key, _NONE)
        return [slots] if isinstance(slots, int) else slots

    def depth(self, keys: Sequence[int], count: int, more_than: int = 0) -> int:
        """Return how many of a chain's first `count` keys are held by more than `more_than` slots. O(log count)."""
        holders, low, high = self._holders, 0, count
        while low < high:  # keys[:low] are held, keys[high:] are not
            middle = (low + high) // 2
            if not more_than:
                enough = keys[middle] in holders
            else:
                slots = holders.get(keys[middle], _NONE)
                enough = (1 if isinstance(slots, int) else len(slots)) > more_than
            if enough:
                low = middle + 1
            else:
                high = middle
        return low

    def slot_depth(self, slot: int, keys: Sequence[int]) -> int:
        """Return how many of a chain's keys the slot holds, counted from the first. O(log keys)."""
        kept, low, high = self._kept[slot], 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in kept:
                low = middle + 1
            else:
                high = middle
        return low

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless both directions of the mapping agree."""
        pairs = {(slot, key) for slot, kept in self._kept.items() for key in kept}
        listed = [(slot, key) for key in self._holders for slot in self.holders(key)]
        if len(listed) != len(set(listed)) or set(listed) != pairs:
            raise AssertionError("a slot's keys and the keys' slots disagree")
        if any(isinstance(slots, list) and len(slots) < 2 for slots in self._holders.values()):
            raise AssertionError("a key has a list of fewer than two slots")

    def _share(self) -> int:
        """Return how many keys a slot may hold."""
        slots = len(self._kept)
        return (self._max_keys or min(max(_KEYS, _KEYS_EACH * slots), _MOST_KEYS)) // slots

    def _drop(self, slot: int, key: int) -> None:
        slots = self._holders[key]
        if isinstance(slots, int):
            del self._holders[key]
            return
        slots.remove(slot)
        if len(slots) == 1:
            self._holders[key] = slots[0]

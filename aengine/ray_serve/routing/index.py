"""What the replicas are believed to have cached: beginnings of prompts, by their hashes, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_NONE: list[int] = []
_KEYS, _KEYS_EACH, _MOST_KEYS = 2**20, 2**12, 2**23


class PrefixIndex:
    """Which replicas hold which keys. A replica is a slot, a small number.

    Each slot keeps its keys in the order of their last use, a prompt's deepest ones older than those before them, as
    the radix tree does that they stand for; beyond its share of `max_keys` the oldest are dropped. So a slot that holds
    a key holds those before it in the chain, but for what the replica has evicted out of order.
    """

    def __init__(self, max_keys: int | None = None) -> None:
        """max_keys: of all slots together; None: 4,096 each, from 2**20 to 2**23 in all."""
        self._max_keys = max_keys
        # key -> slots; the one slot itself where there is one alone, as with nearly all keys: millions of lists would
        # make each collection of garbage a pause, and each look at one a look at memory.
        self._holders: dict[int, int | list[int]] = {}
        self._kept: dict[int, OrderedDict[int, None]] = {}  # slot -> its keys, the longest unused first

    def __len__(self) -> int:
        """The number of (slot, key) pairs that are kept."""
        return sum(map(len, self._kept.values()))

    def join(self, slot: int) -> None:
        """Begin with a slot that holds nothing."""
        self._kept[slot] = OrderedDict()

    def leave(self, slot: int) -> None:
        """Forget a slot and all that it held."""
        self.clear(slot)
        del self._kept[slot]

    def clear(self, slot: int) -> None:
        """Forget all that a slot held."""
        for key in self._kept[slot]:
            self._drop(slot, key)
        self._kept[slot].clear()

    def add(self, slot: int, keys: Sequence[int]) -> None:
        """Note that a slot holds a chain of keys, and used it just now."""
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
        """Whether a slot holds a key."""
        return key in self._kept[slot]

    def forget(self, slot: int, key: int) -> None:
        """Note that a slot no longer holds a key."""
        kept = self._kept[slot]
        if key in kept:
            del kept[key]
            self._drop(slot, key)

    def holders(self, key: int) -> list[int]:
        """The slots that hold a key; not to be changed."""
        slots = self._holders.get(key, _NONE)
        return [slots] if isinstance(slots, int) else slots

    def depth(self, keys: Sequence[int], count: int, more_than: int = 0) -> int:
        """How many of a chain's first `count` keys, from the first, more than so many slots hold. O(log count)."""
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

    def depth_of(self, slot: int, keys: Sequence[int]) -> int:
        """How many of a chain's keys, from the first, the slot holds. O(log keys)."""
        kept, low, high = self._kept[slot], 0, len(keys)
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in kept:
                low = middle + 1
            else:
                high = middle
        return low

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless both directions agree and every slot keeps to its share."""
        pairs = {(slot, key) for slot, kept in self._kept.items() for key in kept}
        listed = [(slot, key) for key in self._holders for slot in self.holders(key)]
        if len(listed) != len(set(listed)) or set(listed) != pairs:
            raise AssertionError("a slot's keys and the keys' slots disagree")
        if any(isinstance(slots, list) and len(slots) < 2 for slots in self._holders.values()):
            raise AssertionError("a list of fewer than two slots is kept")

    def _share(self) -> int:
        """How many keys a slot may keep."""
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

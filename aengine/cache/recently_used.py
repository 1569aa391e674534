"""A bounded cache that forgets what was not used for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentlyUsed(Generic[K, V]):
    """Keeps the values that were used last, up to a total size. The newest one is always kept."""

    def __init__(self, most: int) -> None:
        """most: the total size."""
        self._most = most
        self._size = 0
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()  # values and their sizes, oldest use first

    def get(self, key: K) -> V | None:
        """Return the value of a key, or None. This counts as a use."""
        if (found := self._kept.get(key)) is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Keep the value of a key that has none, and drop the oldest ones that exceed the total size."""
        self._kept[key] = value, size
        self._size += size
        while self._size > self._most and len(self._kept) > 1:
            self._size -= self._kept.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drop all values."""
        self._kept.clear()
        self._size = 0

"""Host memory as slots of one page each, found by key, in least-recently-used order."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HostPage:
    """A slot that holds a page. It is not reused while it is pinned."""

    key: bytes
    slot: int
    pins: int = 0  # copies that are reading it
    known: bool = True  # False: it was dropped; its slot becomes free with the last unpin


class HostPages:
    """The slots of host memory. A slot is free, taken by a copy that fills it, or holds a page.

    Operations are O(1), except that taking slots skips pinned pages in eviction order.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()  # oldest use first
        self._taken: set[int] = set()
        self._dropped: set[HostPage] = set()  # dropped, but still pinned

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    @property
    def pins(self) -> int:
        """The number of copies that are reading pages. O(pages)."""
        return sum(page.pins for page in (*self._pages.values(), *self._dropped))

    def get(self, key: bytes) -> HostPage | None:
        """Return the page with this key, or None. Does not count as a use."""
        return self._pages.get(key)

    def touch(self, key: bytes) -> None:
        """Make a page the most recently used one. Does nothing if there is no page with this key."""
        if key in self._pages:
            self._pages.move_to_end(key)

    def take(self, count: int) -> list[int]:
        """Take at most `count` slots to fill: free ones first, then those of the least recently used pages."""
        while len(self._free) < count:
            oldest = next((page for page in self._pages.values() if not page.pins), None)
            if oldest is None:
                break
            self.drop(oldest.key)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._taken.update(slots)
        return slots

    def put(self, key: bytes, slot: int) -> None:
        """Note that a taken slot now holds the page with this key. If another slot holds that page, free this one."""
        self._taken.remove(slot)
        if key in self._pages:
            self._free.append(slot)
        else:
            self._pages[key] = HostPage(key, slot)
        self.touch(key)

    def release(self, slot: int) -> None:
        """Free a taken slot that was not filled."""
        self._taken.remove(slot)
        self._free.append(slot)

    def pin(self, page: HostPage) -> None:
        """Note that a copy will read the page."""
        page.pins += 1
        self.touch(page.key)

    def unpin(self, page: HostPage) -> None:
        """Note that a copy which read the page has ended."""
        page.pins -= 1
        if not page.known and not page.pins:
            self._dropped.remove(page)
            self._free.append(page.slot)

    def drop(self, key: bytes) -> None:
        """Forget the page with this key, if there is one. Its slot becomes free when no copy reads it."""
        page = self._pages.pop(key, None)
        if page is None:
            return
        page.known = False
        if page.pins:
            self._dropped.add(page)
        else:
            self._free.append(page.slot)

    def clear(self) -> None:
        """Forget all pages."""
        for key in list(self._pages):
            self.drop(key)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless every slot is free, taken, or holds one page."""
        slots = [*self._free, *self._taken, *(page.slot for page in self._pages.values())]
        slots += [page.slot for page in self._dropped]
        if sorted(slots) != list(range(self.slots)):
            raise AssertionError(f"host pages: slots are shared or lost: {sorted(slots)}")
        for key, page in self._pages.items():
            if page.key != key or not page.known or page.pins < 0:
                raise AssertionError("host pages: a page is misfiled")
        for page in self._dropped:
            if page.known or page.pins < 1:
                raise AssertionError("host pages: a dropped page is kept although no copy reads it")

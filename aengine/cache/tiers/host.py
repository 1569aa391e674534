"""Host memory as slots of one page each: which key lies where, least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class HostPage:
    """A slot that holds a page. It is given to nobody else while it is pinned."""

    key: bytes
    slot: int
    pins: int = 0  # copies that read it
    known: bool = True  # False: it was dropped, and its slot is free once nobody reads it


class HostPages:
    """Slots are free, or taken by a copy that fills them, or hold a page. O(1) each, but for pinned pages on the way to
    the oldest unpinned one.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))
        self._pages: OrderedDict[bytes, HostPage] = OrderedDict()  # oldest use first
        self._taken: set[int] = set()
        self._dropped: set[HostPage] = set()  # and still pinned

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: bytes) -> bool:
        return key in self._pages

    @property
    def pins(self) -> int:
        """The number of copies that read pages. O(pages)."""
        return sum(page.pins for page in (*self._pages.values(), *self._dropped))

    def get(self, key: bytes) -> HostPage | None:
        """The page of that key; no use of it."""
        return self._pages.get(key)

    def touch(self, key: bytes) -> None:
        """Make a page, if it is there, the most recently used one."""
        if key in self._pages:
            self._pages.move_to_end(key)

    def take(self, count: int) -> list[int]:
        """Slots to be filled, at most `count`: free ones, then those of the least recently used pages."""
        while len(self._free) < count:
            oldest = next((page for page in self._pages.values() if not page.pins), None)
            if oldest is None:
                break
            self.drop(oldest.key)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        self._taken.update(slots)
        return slots

    def put(self, key: bytes, slot: int) -> None:
        """A taken slot holds the page of that key now, unless another one does already."""
        self._taken.remove(slot)
        if key in self._pages:
            self._free.append(slot)
        else:
            self._pages[key] = HostPage(key, slot)
        self.touch(key)

    def give_back(self, slot: int) -> None:
        """A taken slot was not filled."""
        self._taken.remove(slot)
        self._free.append(slot)

    def pin(self, page: HostPage) -> None:
        """A copy is going to read the page."""
        page.pins += 1
        self.touch(page.key)

    def unpin(self, page: HostPage) -> None:
        """The copy has ended."""
        page.pins -= 1
        if not page.known and not page.pins:
            self._dropped.remove(page)
            self._free.append(page.slot)

    def drop(self, key: bytes) -> None:
        """Forget a page, if it is there; its slot is free once nobody reads it."""
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
        """Raise `AssertionError` unless every slot is free, taken, or one page's."""
        slots = [*self._free, *self._taken, *(page.slot for page in self._pages.values())]
        slots += [page.slot for page in self._dropped]
        if sorted(slots) != list(range(self.slots)):
            raise AssertionError(f"host pages: slots are shared or lost: {sorted(slots)}")
        for key, page in self._pages.items():
            if page.key != key or not page.known or page.pins < 0:
                raise AssertionError("host pages: a page is misfiled")
        for page in self._dropped:
            if page.known or page.pins < 1:
                raise AssertionError("host pages: a dropped page is kept that nobody reads")

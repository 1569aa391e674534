"""Window pages on the fake device. A slot keeps the identity of the prefix that ends in its token."""

from __future__ import annotations

from aengine.cache.pages import PageAllocator
from aengine.cache.windows import WindowPages
from aengine.step_plan import StepPlan
from tests.scheduling.fake_drafts import REFUSED

UNWRITTEN, BROKEN = -1, -2


class _Allocator(PageAllocator):
    """Erases a page as soon as it is free."""

    def __init__(self, num_pages: int, device: FakeWindows) -> None:
        super().__init__(num_pages)
        self._device = device

    def release(self, page: int) -> None:
        super().release(page)
        self._device.forget(page)


class FakeWindows:
    """Checks that a row reads within its window only tokens of its own prefix."""

    def __init__(self, pages: WindowPages, page_size: int) -> None:
        pages.allocator = _Allocator(pages.room.num_pages, self)
        self._window = pages.room.window
        self._size = page_size
        self._slots: dict[int, tuple[int, int]] = {}  # slot -> prefix, and era of the row that wrote it
        self._tables: dict[int, dict[int, int]] = {}  # row -> place -> page
        self.most = 0  # the most pages that were held at once
        self._allocator = pages.allocator

    def forget(self, page: int) -> None:
        for slot in range(page * self._size, (page + 1) * self._size):
            self._slots.pop(slot, None)

    def enter(self, plan: StepPlan) -> None:
        """Apply new rows and changes of page tables, before the forward pass."""
        self.most = max(self.most, sum(self._allocator.held(page) for page in range(1, self._allocator.num_pages)))
        for new in plan.new_rows:
            self._tables[new.row] = dict(enumerate(new.window_pages))
        for row, place, page in plan.new_window_pages:
            self._tables[row][place] = page

    def forward(
        self, row: int, path: list[int], start: int, end: int, era: int, broken: bool, refused: int = 0
    ) -> None:
        """Let a row read the tokens from `start` up to, without, `end`, and write refused drafts after them.

        path: the prefix that ends in each token.
        """
        table, size = self._tables[row], self._size
        for place in range(start, end + refused):
            page = table.get(place // size, 0)
            slot = page * size + place % size
            found, writer = self._slots.get(slot, (UNWRITTEN, 0))
            if page == 0 or not (found == UNWRITTEN or (found == REFUSED and writer == row)):
                raise AssertionError(f"row {row} writes token {place} into page {page} of windows")
            if place >= end:
                self._slots[slot] = REFUSED, row
            else:
                self._slots[slot] = BROKEN if broken else path[place], era
        if broken:
            return
        for place in range(max(0, start + 1 - self._window), end):
            slot = table.get(place // size, 0) * size + place % size
            found, began = self._slots.get(slot, (UNWRITTEN, 0))
            if found != path[place]:
                raise AssertionError(f"row {row} sees a wrong token at {place} in the window before {start}: {found}")
            if began < era:
                raise AssertionError(f"row {row} sees at {place} what was there before the cache was flushed")

    def copy(self, plan: StepPlan) -> None:
        """Copy partly filled pages for forks, after the forward pass."""
        for source, destination in plan.window_copies:
            for offset in range(self._size):
                kept = self._slots.get(source * self._size + offset)
                if kept is not None:
                    self._slots[destination * self._size + offset] = kept

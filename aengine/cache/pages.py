"""Who holds which page of the KV pool.

A page is an index into the pool. Page 0 is reserved: padding rows and finished rows write there, so it is
never handed out. Every other page is either free (no references) or held by one or more owners (sequences,
the radix tree), each of which holds one reference.
"""

from __future__ import annotations


class OutOfPages(Exception):
    """Fewer pages are free than were asked for. Internal: the scheduler evicts or preempts, then retries."""


class PageAllocator:
    """Reference counts over pages 1 .. num_pages - 1. Every operation is O(1) per page."""

    __slots__ = ("_free", "_references", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"the pool needs at least 2 pages, the reserved one included, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page released last is handed out first
        self._references = [0] * num_pages

    @property
    def free(self) -> int:
        """How many pages `take` could hand out now."""
        return len(self._free)

    def references(self, page: int) -> int:
        """How many owners hold the page; 0 means free."""
        return self._references[page]

    def take(self, n: int) -> list[int]:
        """Hand out n free pages with one reference each. Raises `OutOfPages`, taking none, if fewer are free."""
        kept = len(self._free) - n
        if kept < 0:
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} free")
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        pages = self._free[kept:]
        del self._free[kept:]
        pages.reverse()
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Add an owner to a held page. Raises `ValueError` if the page is free or reserved."""
        if self._references[page] == 0:
            raise ValueError(f"page {page} is not held by anyone")
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop an owner; the last one frees the page. Raises `ValueError` if the page is free or reserved."""
        left = self._references[page] - 1
        if left < 0:
            raise ValueError(f"page {page} is not held by anyone")
        self._references[page] = left
        if left == 0:
            self._free.append(page)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the free pages are exactly those without references. O(pages)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is on the free list twice")
        if 0 in free or self._references[0] != 0:
            raise AssertionError("the reserved page 0 is in circulation")
        for page in range(1, self.num_pages):
            if (self._references[page] == 0) != (page in free):
                raise AssertionError(f"page {page} has {self._references[page]} references, free: {page in free}")

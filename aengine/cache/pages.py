"""The page allocator: a free list of pages of the KV pool.

A page is an index into the pool. Page 0 is reserved: padding rows and finished rows write there, so it is
never handed out. Every other page is free or has one owner: a sequence, several choices that share a prompt, or the
radix tree.
"""

from __future__ import annotations


class OutOfPages(Exception):
    """Fewer pages are free than requested. Internal: the scheduler evicts or preempts before it takes pages."""


class PageAllocator:
    """Hands out pages 1 .. num_pages - 1 and takes them back. Every operation is O(1) per page."""

    __slots__ = ("_free", "_held", "num_pages")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"the pool needs at least 2 pages, the reserved one included, got {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: the page released last is handed out first
        self._held = bytearray(num_pages)  # 1: handed out

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def held(self, page: int) -> bool:
        """Return whether the page is handed out."""
        return self._held[page] == 1

    def take(self, n: int) -> list[int]:
        """Hand out n free pages. Raises `OutOfPages` if fewer are free, and then takes none."""
        left = len(self._free) - n
        if left < 0:
            raise OutOfPages(f"{n} pages wanted, {len(self._free)} free")
        if n < 0:
            raise ValueError(f"cannot take {n} pages")
        pages = self._free[left:]
        del self._free[left:]
        pages.reverse()
        for page in pages:
            self._held[page] = 1
        return pages

    def release(self, page: int) -> None:
        """Free a page. Raises `ValueError` if it is free already, or reserved."""
        if not self._held[page]:
            raise ValueError(f"page {page} is not held")
        self._held[page] = 0
        self._free.append(page)

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless each page is either free or held. O(pages)."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is on the free list twice")
        if 0 in free or self._held[0]:
            raise AssertionError("the reserved page 0 is free or handed out")
        for page in range(1, self.num_pages):
            if self.held(page) == (page in free):
                raise AssertionError(f"page {page} is {'held, and ' if self.held(page) else 'not held, nor '}free")

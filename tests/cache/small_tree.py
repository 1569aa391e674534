"""A tree of cached prefixes over a small pool of pages."""

from __future__ import annotations

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree

PAGE = 4


class Cache:
    """A tree and its allocator, with the two operations of most examples."""

    def __init__(self, num_pages: int = 100, page_size: int = PAGE) -> None:
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(self.allocator, page_size)

    def add(self, ids: list[int], salt: str | None = None) -> tuple[list[int], Node]:
        """Cache a run of private pages. Release the pages that the tree does not take."""
        pages = self.allocator.take(len(ids) // self.tree.page_size)
        node, taken = self.tree.insert(ids, pages, salt)
        for page, tree_has_it in zip(pages, taken):
            if not tree_has_it:
                self.allocator.release(page)
        self.check()
        return pages, node

    def cached(self, ids: list[int], salt: str | None = None) -> list[int]:
        pages, _ = self.tree.match(ids, salt)
        self.check()
        return pages

    def check(self) -> None:
        self.tree.check_integrity()
        self.allocator.check_integrity()


def run(*pages: int) -> list[int]:
    """Return the token ids of whole pages. Each page is named by a number."""
    return [1000 * page + i for page in pages for i in range(PAGE)]

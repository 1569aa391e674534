"""Pages of layers with a sliding window: users, pages in the tree, and the order of eviction."""

from __future__ import annotations

from collections import Counter

import pytest

from aengine.cache.pages import OutOfPages, PageAllocator
from aengine.cache.radix import RadixTree
from aengine.cache.windows import WindowPages, WindowRoom

SIZE = 4


class Cache:
    """A tree with a window of 8 tokens: two pages, or three if the window begins inside a page."""

    def __init__(self, num_pages: int = 12) -> None:
        self.allocator = PageAllocator(100)
        self.tree = RadixTree(self.allocator, SIZE)
        self.windows = WindowPages(WindowRoom(8, num_pages), SIZE)
        self.tree.watchers.append(self.windows)

    def keep(self, ids: list[int], first: int = 0) -> list[int]:
        """Cache a run, with window pages from place `first` on."""
        count = len(ids) // SIZE
        pages = self.allocator.take(count)
        inserted = self.tree.insert(ids, pages)
        for page, taken in zip(pages, inserted.taken):
            if not taken:
                self.allocator.release(page)
        own = self.windows.take(count - first)
        self.windows.file(inserted.node, first, own)
        for page in own:
            self.windows.release(page)
        return own

    def found(self, ids: list[int]) -> int:
        return self.windows.usable_prefix(self.tree.match(ids).pages)

    def check(self, used: Counter[int] | None = None) -> None:
        cached: set[int] = set()
        nodes = [self.tree.root]
        while nodes:
            node = nodes.pop()
            cached.update(node.pages)
            nodes += node.children.values()
        self.windows.check_integrity(used or Counter(), cached)


IDS = list(range(40))


def test_a_hit_needs_the_last_window_and_nothing_before() -> None:
    cache = Cache()
    cache.keep(IDS, first=8)
    assert cache.found(IDS) == 10  # the query at position 40 sees 33 to 40: pages 8 and 9
    assert cache.found(IDS[:36]) == 0  # the query at position 36 sees page 7
    cache.check()


def test_the_deepest_place_with_a_whole_window_is_taken() -> None:
    cache = Cache()
    cache.keep(IDS[:16])
    cache.keep(IDS, first=7)
    assert cache.found(IDS) == 10
    assert cache.found(IDS[:32]) == 4  # after page 8, the window would begin in page 6
    cache.check()


def test_idle_pages_are_taken_the_least_recently_used_first_spare_ones_before() -> None:
    cache = Cache(num_pages=8)
    first = cache.keep(IDS[:8])
    second = cache.keep([100 + i for i in range(8)])
    spare = cache.windows.take(1)
    cache.windows.file(cache.tree.match(IDS[:8]).node, 0, spare)  # the tree has one already, so it becomes free
    cache.windows.release(spare[0], evict_first=True)
    assert cache.windows.allocator.free == 3
    cache.windows.share(first)
    cache.windows.release(first[0])
    cache.windows.release(first[1], evict_first=True)
    taken = cache.windows.take(4)
    assert first[1] in taken
    cache.windows.take(1)
    assert cache.found([100 + i for i in range(8)]) == 0  # the first page of the older run is gone
    assert cache.found(IDS[:8]) == 1
    assert second[0] != first[0]
    with pytest.raises(OutOfPages):
        cache.windows.take(3)


def test_a_page_in_use_is_not_taken() -> None:
    cache = Cache(num_pages=8)
    pages = cache.keep(IDS[:8])
    cache.windows.share(pages)
    assert cache.windows.available == 5
    cache.windows.take(5)
    assert cache.found(IDS[:8]) == 2
    with pytest.raises(OutOfPages):
        cache.windows.take(1)


def test_pages_go_with_the_run_that_they_are_filed_under() -> None:
    cache = Cache()
    pages = cache.keep(IDS[:16])
    cache.windows.share(pages[3:])
    cache.tree.evict(1)
    assert cache.windows.allocator.free == 11 - 4  # the last one has a user
    cache.windows.release(pages[3])
    assert cache.windows.allocator.free == 11 - 3
    cache.tree.clear()
    assert cache.windows.allocator.free == 11
    cache.check()


def test_what_is_released_twice_is_refused() -> None:
    cache = Cache()
    (page,) = cache.windows.take(1)
    cache.windows.release(page)
    with pytest.raises(ValueError, match="no user"):
        cache.windows.release(page)


def test_too_few_pages_for_one_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        WindowPages(WindowRoom(8, 6), SIZE)

"""Bookkeeping of the separate pool of pages for layers with a sliding window.

The layers of a model form one or two groups. Layers that see all earlier tokens use the pages of the radix tree. Layers
with a window use the pages here, which hold the same number of tokens. A sequence keeps window pages of its last tokens
only: a page outside every window is freed while the sequence runs.

A window page is filed under the tree's page that holds the same tokens, and leaves the tree with it. A cached prefix
can be used if all pages of the window before its end are filed. Sequences read filed pages without copying them. Each
page counts its users. A filed page without users is idle. If no page is free, the least recently used idle page is
evicted. Page 0 is reserved as in every pool.

If all layers of a model have a window, the tree's own pages hold no data and only count tokens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aengine.cache.pages import OutOfPages, PageAllocator
from aengine.cache.radix import Namespace, Node


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """The size of a model's window group."""

    window: int  # tokens that a query sees, its own included; the largest if layers differ
    num_pages: int  # including the reserved one

    @staticmethod
    def min_pages(window: int, page_size: int) -> int:
        """Return the fewest pages with which one sequence can run, including the reserved one.

        These are the pages that a window touches, one before it (`first_kept`), the page being filled and the next.
        """
        return -(-window // page_size) + 5

    @staticmethod
    def decode_pages(window: int, page_size: int) -> int:
        """Return about how many pages a decoding sequence holds."""
        return -(-window // page_size) + 2


class WindowPages:
    """Hands out pages to sequences, and files the pages that they give to the tree. Must watch the tree."""

    def __init__(self, room: WindowRoom, page_size: int) -> None:
        if room.num_pages < WindowRoom.min_pages(room.window, page_size):
            raise ValueError(f"{room.num_pages} pages of {page_size} tokens are too few for a window of {room.window}")
        self.room = room
        self.allocator = PageAllocator(room.num_pages)
        self._page_size = page_size
        self._users = [0] * room.num_pages
        self._filed: dict[int, int] = {}  # the tree's page -> window page
        self._under: dict[int, int] = {}  # window page -> the tree's page
        self._idle: OrderedDict[int, None] = OrderedDict()  # filed, without users; in eviction order

    @property
    def usable(self) -> int:
        """The number of pages, without the reserved one."""
        return self.room.num_pages - 1

    @property
    def decode_pages(self) -> int:
        """About how many pages a decoding sequence holds."""
        return WindowRoom.decode_pages(self.room.window, self._page_size)

    @property
    def idle(self) -> int:
        """The number of pages in the tree that no sequence uses."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """The number of pages that are free or idle."""
        return self.allocator.free + len(self._idle)

    def first_read(self, tokens: int) -> int:
        """Return the index of the first page that the query after `tokens` tokens reads."""
        return max(0, tokens + 1 - self.room.window) // self._page_size

    def first_kept(self, tokens: int) -> int:
        """Return the index of the first page that a sequence with `tokens` computed tokens keeps.

        A stop string may cut the sequence to the last page border but one. The query there must still find its window.
        """
        return self.first_read(max(0, tokens // self._page_size - 1) * self._page_size)

    def take(self, n: int) -> list[int]:
        """Hand out n pages with one user each. Evicts idle pages if too few are free.

        Raises `OutOfPages` if there are not enough, and then takes none.
        """
        if n > self.available:
            raise OutOfPages(f"{n} window pages wanted, {self.available} available")
        for _ in range(n - self.allocator.free):
            page, _ = self._idle.popitem(last=False)
            del self._filed[self._under.pop(page)]
            self.allocator.release(page)
        pages = self.allocator.take(n)
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each page."""
        for page in pages:
            if not self._users[page]:
                del self._idle[page]
            self._users[page] += 1

    def release(self, page: int, evict_first: bool = False) -> None:
        """Drop one user. evict_first: if the page becomes idle, put it first in the eviction order."""
        users = self._users[page] = self._users[page] - 1
        if users < 0:
            raise ValueError(f"window page {page} has no user")
        if users:
            return
        if page not in self._under:
            self.allocator.release(page)
            return
        self._idle[page] = None
        if evict_first:
            self._idle.move_to_end(page, last=False)

    def usable_prefix(self, pages: Sequence[int]) -> int:
        """Return how many of a cached prefix's pages can be used. The window before their end must be filed."""
        depth = at = len(pages)
        while at > self.first_read(depth * self._page_size):
            at -= 1
            if pages[at] not in self._filed:
                depth = at
        return depth

    def window_of(self, pages: Sequence[int]) -> tuple[int, list[int]]:
        """Return the first index that the query after a usable prefix reads, and the window pages from there on."""
        first = self.first_read(len(pages) * self._page_size)
        return first, [self._filed[page] for page in pages[first:]]

    def file(self, node: Node, first: int, pages: Sequence[int]) -> None:
        """File window pages under the tree's pages at indices `first`, `first` + 1, ... on the path to `node`.

        A tree's page that has a window page already keeps it. Raises `ValueError` if the path is shorter.
        """
        end = first + len(pages)
        if end > node.depth:
            raise ValueError(f"the path to the node has {node.depth} pages, not {end}")
        step: Node | None = node
        while step is not None and step.parent is not None and step.depth > first:
            begins = step.depth - len(step.pages)
            for index in range(max(first, begins), min(end, step.depth)):
                page, above = pages[index - first], step.pages[index - begins]
                if above not in self._filed and page not in self._under:
                    self._filed[above] = page
                    self._under[page] = above
            step = step.parent

    # ---- events of the tree ------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """Do nothing: window pages of a new run are filed later."""

    def removed(self, pages: Sequence[int]) -> None:
        for above in pages:
            page = self._filed.pop(above, None)
            if page is not None:
                del self._under[page]
                if not self._users[page]:
                    del self._idle[page]
                    self.allocator.release(page)

    def cleared(self) -> None:
        self.removed(list(self._filed))

    def check_integrity(self, used: Counter[int], cached: set[int]) -> None:
        """Raise `AssertionError` unless every page is free, idle or in use. used: number of sequences by page."""
        self.allocator.check_integrity()
        for page in range(1, self.room.num_pages):
            users = self._users[page]
            _require(users == used[page], f"page {page} has {used[page]} users, not {users}")
            held = users > 0 or page in self._under
            _require(
                self.allocator.held(page) == held,
                f"page {page} is {'handed out without a user' if not held else 'free'}",
            )
            idle = users == 0 and page in self._under
            _require(
                (page in self._idle) == idle,
                f"page {page} is {'' if idle else 'not '}idle, but the eviction order disagrees",
            )
        _require(
            {page: above for above, page in self._filed.items()} == self._under,
            "the two indices of filed pages disagree",
        )
        _require(self._filed.keys() <= cached, "a window page is filed under a page that the tree does not hold")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"windows: {message}")

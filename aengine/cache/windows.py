"""Pages of layers with a sliding window: bookkeeping of a pool of their own.

The layers of a model form one or two groups. Layers that see all earlier tokens use the pages of the radix tree. Layers
with a window use the pages here, which hold the same number of tokens. A sequence keeps window pages of its last tokens
only: a page outside every window is freed while the sequence runs.

A window page is filed under the tree's page that holds the same tokens, and leaves the tree with it. A cached prefix
can be used if the window before its end is filed. Sequences read window pages in place. Each page counts its users. A
page that is filed and has no user is idle; if no page is free, the least recently used idle page is taken. Page 0 is
reserved as in every pool.

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

    window: int  # tokens that a query sees, including its own; the widest if layers differ
    num_pages: int  # including the reserved one

    @staticmethod
    def least(window: int, page_size: int) -> int:
        """Return the fewest pages with which one sequence can run, including the reserved one.

        These are the pages that a window touches, one before it (`kept_from`), the page being filled and the next.
        """
        return -(-window // page_size) + 5

    @staticmethod
    def held(window: int, page_size: int) -> int:
        """Return about how many pages a decoding sequence holds."""
        return -(-window // page_size) + 2


class WindowPages:
    """Hands out pages to sequences, and files the pages that they give to the tree. It must watch the tree."""

    def __init__(self, room: WindowRoom, page_size: int) -> None:
        if room.num_pages < WindowRoom.least(room.window, page_size):
            raise ValueError(f"{room.num_pages} pages of {page_size} tokens are too few for a window of {room.window}")
        self.room = room
        self.allocator = PageAllocator(room.num_pages)
        self.evictions = 0  # to make room for others; pages that leave with the tree's do not count
        self._page_size = page_size
        self._users = [0] * room.num_pages
        self._filed: dict[int, int] = {}  # the tree's page -> window page
        self._under: dict[int, int] = {}  # the reverse
        self._idle: OrderedDict[int, None] = OrderedDict()  # filed, without users; in eviction order

    @property
    def usable(self) -> int:
        """The number of pages without the reserved one."""
        return self.room.num_pages - 1

    @property
    def steady(self) -> int:
        """About how many pages a decoding sequence holds."""
        return WindowRoom.held(self.room.window, self._page_size)

    @property
    def filed(self) -> int:
        """The number of pages in the tree."""
        return len(self._filed)

    @property
    def idle(self) -> int:
        """The number of pages in the tree that no sequence uses."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """The number of pages that are free or idle."""
        return self.allocator.free + len(self._idle)

    def seen_from(self, tokens: int) -> int:
        """Return the first page that the query after `tokens` tokens reads."""
        return max(0, tokens + 1 - self.room.window) // self._page_size

    def kept_from(self, tokens: int) -> int:
        """Return the first page that a sequence with `tokens` computed tokens keeps.

        It can read from the last page border but one onwards: a stop string may cut the sequence there.
        """
        return self.seen_from(max(0, tokens // self._page_size - 1) * self._page_size)

    def take(self, n: int) -> list[int]:
        """Hand out n pages with one user each, after evicting idle ones if too few are free.

        Raises `OutOfPages`, and takes none, if there are not enough.
        """
        if n > self.available:
            raise OutOfPages(f"{n} window pages wanted, {self.available} available")
        for _ in range(n - self.allocator.free):
            page, _ = self._idle.popitem(last=False)
            del self._filed[self._under.pop(page)]
            self.allocator.release(page)
            self.evictions += 1
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

    def release(self, page: int, spare: bool = False) -> None:
        """Drop one user. spare: if the page is idle then, evict it before all others."""
        users = self._users[page] = self._users[page] - 1
        if users < 0:
            raise ValueError(f"window page {page} has no user")
        if users:
            return
        if page not in self._under:
            self.allocator.release(page)
            return
        self._idle[page] = None
        if spare:
            self._idle.move_to_end(page, last=False)

    def deepest(self, pages: Sequence[int]) -> int:
        """Return how many of a cached prefix's pages can be used: the window before their end must be filed."""
        depth = at = len(pages)
        while at > self.seen_from(depth * self._page_size):
            at -= 1
            if pages[at] not in self._filed:
                depth = at
        return depth

    def window_of(self, pages: Sequence[int]) -> tuple[int, list[int]]:
        """Return the first place that the query after a prefix from `deepest` reads, and the pages from there on."""
        first = self.seen_from(len(pages) * self._page_size)
        return first, [self._filed[page] for page in pages[first:]]

    def file(self, node: Node, first: int, pages: Sequence[int]) -> None:
        """Give pages in use to the tree: they belong at the places from `first` on, on the path to `node`.

        A page that the tree has already is kept as it is. Raises `ValueError` if the path is shorter.
        """
        end = first + len(pages)
        if end > node.depth:
            raise ValueError(f"the path to the node has {node.depth} pages, not {end}")
        step: Node | None = node
        while step is not None and step.parent is not None and step.depth > first:
            begins = step.depth - len(step.pages)
            for place in range(max(first, begins), min(end, step.depth)):
                page, above = pages[place - first], step.pages[place - begins]
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
            _require(self.allocator.held(page) == held, f"page {page} is {'held by nobody' if not held else 'free'}")
            idle = users == 0 and page in self._under
            _require((page in self._idle) == idle, f"page {page} is {'' if idle else 'not '}idle, which is not known")
        _require({page: above for above, page in self._filed.items()} == self._under, "pages are filed in disorder")
        _require(self._filed.keys() <= cached, "one is filed under a page that the tree does not hold")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"windows: {message}")

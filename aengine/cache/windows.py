"""Pages of layers with a sliding window: bookkeeping of a pool of their own beside that of layers that see everything.

The layers of a model that page their keys and values are of one or two groups. Those that see all tokens before a
query keep the pages that the radix tree is made of. Those with a window keep pages here, as large in tokens, and only
of the last tokens of a sequence: what lies behind every window goes back while the sequence runs.

A page of the tree stands for the tokens of its run, so a page of the window group that holds the same tokens is filed
under it, and goes with it. A hit needs filed pages for the last window before it alone. Sequences read pages in place:
each counts its users, and a page that is filed and has none is idle, the least recently used of which is taken where
none is free. Page 0 is reserved as in every pool.

Where no layer sees everything the tree's own pages hold nothing, and there may be as many as contexts are long.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aengine.cache.pages import OutOfPages, PageAllocator
from aengine.cache.radix import Namespace, Node


@dataclass(frozen=True, slots=True)
class WindowRoom:
    """The window group of a model, and how many pages it has, the reserved one included."""

    window: int  # tokens that a query sees, its own included; the widest, where layers differ
    num_pages: int

    @staticmethod
    def least(window: int, page_size: int) -> int:
        """How many pages one sequence needs to go on at all, and the reserved one.

        Those that a window of tokens touches, one behind it (`kept_from`), the one that is being filled and the next.
        """
        return -(-window // page_size) + 5

    @staticmethod
    def held(window: int, page_size: int) -> int:
        """How many pages a sequence that goes on token by token holds, about."""
        return -(-window // page_size) + 2


class WindowPages:
    """Hands out pages to sequences, and files those that sequences give to the tree. It has to watch the tree."""

    def __init__(self, room: WindowRoom, page_size: int) -> None:
        if room.num_pages < WindowRoom.least(room.window, page_size):
            raise ValueError(f"{room.num_pages} pages of {page_size} tokens are too few for a window of {room.window}")
        self.room = room
        self.allocator = PageAllocator(room.num_pages)
        self.evictions = 0  # for another's sake; not those that went with the tree's pages
        self._page_size = page_size
        self._users = [0] * room.num_pages
        self._filed: dict[int, int] = {}  # by the tree's page
        self._under: dict[int, int] = {}  # the reverse
        self._idle: OrderedDict[int, None] = OrderedDict()  # filed, without users; the next one to be taken first

    @property
    def usable(self) -> int:
        """All pages but the reserved one."""
        return self.room.num_pages - 1

    @property
    def steady(self) -> int:
        """How many pages a sequence that goes on token by token holds, about."""
        return WindowRoom.held(self.room.window, self._page_size)

    @property
    def filed(self) -> int:
        """How many the tree has."""
        return len(self._filed)

    @property
    def idle(self) -> int:
        """How many of these nobody uses."""
        return len(self._idle)

    @property
    def available(self) -> int:
        """How many are free or idle."""
        return self.allocator.free + len(self._idle)

    def seen_from(self, tokens: int) -> int:
        """The first page that a query behind so many tokens sees anything of."""
        return max(0, tokens + 1 - self.room.window) // self._page_size

    def kept_from(self, tokens: int) -> int:
        """The first page that a sequence with so many computed tokens keeps.

        What queries see from the last but one border of a page on: the sequence may end there, cut by a stop string.
        """
        return self.seen_from(max(0, tokens // self._page_size - 1) * self._page_size)

    def take(self, n: int) -> list[int]:
        """Hand out n pages with one user each, idle ones where too few are free.

        Raises `OutOfPages`, taking none, if there are not enough.
        """
        if n > self.available:
            raise OutOfPages(f"{n} pages of windows wanted, {self.available} available")
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
        """One more user of each."""
        for page in pages:
            if not self._users[page]:
                del self._idle[page]
            self._users[page] += 1

    def release(self, page: int, spare: bool = False) -> None:
        """One user less. spare: if it is idle then, it is the next one to be taken."""
        users = self._users[page] = self._users[page] - 1
        if users < 0:
            raise ValueError(f"page {page} of windows has no user")
        if users:
            return
        if page not in self._under:
            self.allocator.release(page)
            return
        self._idle[page] = None
        if spare:
            self._idle.move_to_end(page, last=False)

    def deepest(self, pages: Sequence[int]) -> int:
        """How many of a cached prefix's pages a hit can cover: before its end a whole window is filed."""
        depth = at = len(pages)
        while at > self.seen_from(depth * self._page_size):
            at -= 1
            if pages[at] not in self._filed:
                depth = at
        return depth

    def window_of(self, pages: Sequence[int]) -> tuple[int, list[int]]:
        """The first page that is seen from behind a prefix that `deepest` gave, and the pages from there on."""
        first = self.seen_from(len(pages) * self._page_size)
        return first, [self._filed[page] for page in pages[first:]]

    def file(self, node: Node, first: int, pages: Sequence[int]) -> None:
        """Give pages, each of which has a user, to the tree: they stand from place `first` on, on the way to `node`.

        Where the tree has one already it keeps its own. Raises `ValueError` if the way is shorter.
        """
        end = first + len(pages)
        if end > node.depth:
            raise ValueError(f"the way to the node has {node.depth} pages, not {end}")
        step: Node | None = node
        while step is not None and step.parent is not None and step.depth > first:
            begins = step.depth - len(step.pages)
            for place in range(max(first, begins), min(end, step.depth)):
                page, above = pages[place - first], step.pages[place - begins]
                if above not in self._filed and page not in self._under:
                    self._filed[above] = page
                    self._under[page] = above
            step = step.parent

    # ---- what it hears of the tree ------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """A run without pages of windows: they come later."""

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
        """Raise `AssertionError` unless every page is free, idle or some sequence's. used: sequences by page."""
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

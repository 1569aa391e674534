"""A stand-in for a replica in a simulation: the engine's radix tree and allocator, and a clock for the rest."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree
from aengine.ray_serve.routing.cached_keys import CachedKeys
from aengine.ray_serve.routing.load import Speed
from aengine.ray_serve.routing.prompt import Prompt

PAGE = 16
PAGES = 2**14  # 262,144 tokens
ROWS = 256
# Of an 8B on an H200 in bfloat16 (bench/README.md): 42,500 tokens of prompts a second, 251 tokens of one stream,
# 12,900 of 256 together.
PREFILL = 1 / 42_500  # seconds a token
STEP = 1 / 251  # seconds a step that decodes one row
ROW = (256 / 12_900 - STEP) / 255  # seconds that a further row adds to it
SPEED = Speed(prefill=PREFILL, step=STEP, rows=ROWS)

At = Callable[[float, Callable[[float], None]], None]

_FREE_PAGES = list(range(PAGES - 1, 0, -1))  # the numbers, once for all replicas


class _Pages(PageAllocator):
    """Shares its numbers with the allocators of the other replicas."""

    def __init__(self) -> None:
        super().__init__(2)
        self.num_pages = PAGES
        self._free = _FREE_PAGES.copy()
        self._held = bytearray(PAGES)


class StandIn:
    """Computes whole prompts one after another, and looks each up in the tree when its turn comes.

    Each token of an answer takes a step, whose length depends on the rows at its beginning. The tree decides what is
    cached and evicted.
    """

    def __init__(self) -> None:
        self.allocator = _Pages()
        self.tree = RadixTree(self.allocator, PAGE)
        self.cached = CachedKeys(PAGE)
        self.tree.watchers.append(self.cached)
        self.waiting: deque[Callable[[float], bool]] = deque()  # admit the request, if it fits
        self.running = 0  # requests, including waiting ones
        self.rows = 0
        self.busy_until = 0.0
        self.occupied = 0.0  # seconds that requests spent here, together
        self.gone = False

    def serve(
        self,
        ids: array[int],
        answer: array[int],
        prompt: Prompt,
        now: float,
        at: At,
        first: Callable[[float, int], None],
        ended: Callable[[float], None],
    ) -> None:
        """Take a request up; `first` and `ended` hear of its first and last token."""
        self.running += 1
        arrived = now
        whole = ids + answer
        pages_needed = -(-len(whole) // PAGE)

        def admit(now: float) -> bool:
            if self.rows >= ROWS:
                return False
            match = self.tree.match(ids[:-1])
            self.tree.lock(match.node)
            own = pages_needed - len(match.pages)
            short = own - self.allocator.free
            if short > 0 and (short > self.tree.evictable_pages or self.tree.evict(short) < short):
                self.tree.unlock(match.node)
                return False
            pages = match.pages + self.allocator.take(own)
            self.rows += 1
            cached = len(match.pages) * PAGE
            seconds = (len(ids) - cached) * PREFILL
            self.busy_until = now + seconds
            # With one step of lookahead the next prompt begins before this one's pages are in the tree.
            at(now + seconds + STEP + self.rows * ROW, lambda when: prefilled(when, match.node, pages, cached))
            return True

        def prefilled(when: float, node: Node, pages: list[int], cached: int) -> None:
            if self.gone:
                return
            first(when, cached)
            full = len(ids) // PAGE
            inserted = self.tree.insert(ids, pages[:full])
            self.tree.lock(inserted.node)
            self.tree.unlock(node)
            private = [page for page, taken in zip(pages, inserted.taken, strict=False) if not taken]
            self.cached.note(prompt, len(ids), self.tree.match(ids).pages if private else pages[:full])
            seconds = len(answer) * (STEP + self.rows * ROW)
            at(when + seconds, lambda when: end(when, inserted.node, private, pages[full:]))

        def end(when: float, node: Node, private: list[int], rest: list[int]) -> None:
            if self.gone:
                return
            full, begun = len(whole) // PAGE, len(ids) // PAGE
            inserted = self.tree.insert(whole[begun * PAGE :], rest[: full - begun], below=node)
            for page, taken in zip(rest, inserted.taken, strict=False):
                if not taken:
                    self.allocator.release(page)
            for page in rest[full - begun :] + private:
                self.allocator.release(page)
            self.tree.unlock(node)
            self.rows -= 1
            self.running -= 1
            self.occupied += when - arrived
            ended(when)
            self._next(when, at)

        self.waiting.append(admit)
        if len(self.waiting) == 1:
            self._next(now, at)

    def _next(self, now: float, at: At) -> None:
        """Begin with the next prompt, unless one is being computed."""
        if self.waiting and now >= self.busy_until and self.waiting[0](now):
            self.waiting.popleft()
            if self.busy_until > now:
                at(self.busy_until, lambda when: self._next(when, at))
            else:
                self._next(now, at)

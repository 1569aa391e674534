"""Pages for sequences: taken from the free list, found in the radix tree, given back to either."""

from __future__ import annotations

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import RadixTree
from aengine.scheduling.sequence import Sequence


class SequenceMemory:
    """Moves pages between the allocator, the radix tree and sequences.

    A page of a sequence is either *private* (the sequence holds one reference at the allocator) or the
    tree's (the sequence holds a lock on the node that covers it).
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(self.allocator, page_size)
        self.usable_pages = num_pages - 1  # page 0 is reserved

    def pages_for(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_size)

    @property
    def available(self) -> int:
        """Pages that are free or can be made free by evicting."""
        return self.allocator.free + self.tree.evictable_pages

    def reserve(self, pages: int) -> bool:
        """Make at least that many pages free, evicting cached ones if need be; whether it worked."""
        short = pages - self.allocator.free
        while short > 0 and self.tree.evict(short):
            short = pages - self.allocator.free
        return short <= 0

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Give a sequence the cached part of its tokens and fresh pages for the rest, or nothing.

        At least the last token is left to compute. `headroom` pages must stay available beyond that.
        """
        if self.available <= headroom:
            return False  # at least one fresh page is needed; spares looking up the prefix in every step
        known = len(sequence.tokens)
        needed = self.pages_for(known)
        cached: list[int] = []
        if self.prefix_cache:
            usable = 0 if sequence.scoring else known - 1
            match = self.tree.match(sequence.tokens[:usable], sequence.salt)
            cached = match.pages
            self.tree.lock(match.node)  # before anything is evicted
            sequence.node = match.node
        missing = needed - len(cached)
        # Asked first, so that a sequence that has to wait does not empty the cache in vain.
        if missing + headroom > self.available or not self.reserve(missing):
            self._unlock(sequence)
            return False
        fresh = self.allocator.take(missing)
        sequence.pages = cached + fresh
        sequence.private = set(fresh)
        sequence.launched = sequence.computed = len(cached) * self.page_size
        return True

    def grow(self, sequence: Sequence) -> int:
        """Append one fresh page, which `reserve` must have made free, and return it."""
        (page,) = self.allocator.take(1)
        sequence.pages.append(page)
        sequence.private.add(page)
        return page

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Share the leader's full prompt pages with a sibling and give it a page of its own for the rest.

        Returns the copy (source page, destination page) that the partly filled page needs, if there is
        one. `reserve(1)` must have succeeded.
        """
        full, partial = divmod(leader.launched, self.page_size)
        sibling.pages = leader.pages[:full]
        for page in sibling.pages:
            if page in leader.private:
                self.allocator.share(page)
                sibling.private.add(page)
        if leader.node is not None:
            self.tree.lock(leader.node)
            sibling.node = leader.node
        if not partial:
            return None
        return leader.pages[full], self.grow(sibling)

    def publish(self, sequence: Sequence, tokens: int) -> None:
        """Offer the full pages of the first `tokens` computed tokens to the tree."""
        full = tokens // self.page_size
        if not self.prefix_cache or full == 0 or sequence.tainted:
            return
        covered = sequence.node.depth if sequence.node is not None else 0
        if full <= covered:
            return
        node, taken = self.tree.insert(sequence.tokens, sequence.pages[:full], sequence.salt, sequence.node)
        self.tree.lock(node)
        self._unlock(sequence)
        sequence.node = node
        # Where the tree already held another page the sequence keeps its own until it ends.
        sequence.private.difference_update(
            page for page, gone in zip(sequence.pages[covered:full], taken[covered:], strict=True) if gone
        )

    def returnable(self, sequence: Sequence) -> int:
        """Pages that become available when the sequence gives everything back: those that it alone holds."""
        pages = sum(1 for page in sequence.private if self.allocator.references(page) == 1)
        node = sequence.node
        while node is not None and node.locks == 1:
            pages += len(node.pages)
            node = node.parent
        return pages

    def release(self, sequence: Sequence) -> None:
        """Give everything back: what is computed stays in the tree as cache, the rest becomes free."""
        # The newest token's KV was never written, and `computed` does not count it. It counts more than the tokens
        # only where a stop string cut them.
        self.publish(sequence, min(sequence.computed, len(sequence.tokens)))
        for page in sequence.private:
            self.allocator.release(page)
        self._unlock(sequence)
        sequence.private = set()
        sequence.pages = []

    def _unlock(self, sequence: Sequence) -> None:
        if sequence.node is not None:
            self.tree.unlock(sequence.node)
            sequence.node = None

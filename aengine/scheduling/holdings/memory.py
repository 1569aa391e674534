"""Allocates pages to sequences: taken from the free list, found in the radix tree, given back to either."""

from __future__ import annotations

from dataclasses import dataclass

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree
from aengine.scheduling.holdings.snapshots import SequenceSnapshots
from aengine.scheduling.holdings.windows import SequenceWindows
from aengine.scheduling.sequence import AdmittedPages, Sequence


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The last sequence that did not fit. It still does not while the tree has not changed and no more is available."""

    sequence: Sequence
    needed: int  # pages that are not locked already
    windows: int  # the same of layers with a window
    changes: int  # of the tree


class SequenceMemory:
    """Moves pages between the allocator, the radix tree and sequences.

    A page of a sequence is the tree's (a lock on the node that covers it holds it), or it is private: to the
    choices that were admitted with it together, or, where it grew later, to the sequence alone.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool,
        snapshots: SequenceSnapshots | None = None,
        windows: SequenceWindows | None = None,
    ) -> None:
        """snapshots: of sequences that have states; windows: of layers that keep no more than a window of each. Where
        there are any, only a prefix that has its part of each is of any use.
        """
        self.page_size = page_size
        self.prefix_cache = prefix_cache and (snapshots is None or snapshots.any)
        self.snapshots = snapshots
        self.windows = windows
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(self.allocator, page_size)
        if snapshots is not None:
            self.tree.watchers.append(snapshots.slots)
        if windows is not None:
            self.tree.watchers.append(windows.pages)
        self.usable_pages = num_pages - 1  # page 0 is reserved
        self._refused: _Refusal | None = None

    def pages_for(self, tokens: int) -> int:
        """The number of pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_size)

    @property
    def available(self) -> int:
        """The number of pages that are free or can be made free by evicting."""
        return self.allocator.free + self.tree.evictable_pages

    def reserve(self, pages: int) -> bool:
        """Make so many pages free, evicting cached ones if need be, and one of windows; whether it worked."""
        if self.windows is not None and not self.windows.pages.available:
            return False
        short = pages - self.allocator.free
        if short > 0:
            short -= self.tree.evict(short)
        return short <= 0

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Allocate a sequence's pages, the cached part of its tokens from the tree and fresh ones for the rest, or none
        at all.

        At least the last token is left to compute. `headroom` pages must stay available beyond that. A sequence
        that did not fit is looked up again only when it might: asking in every step costs next to nothing.
        """
        if self.refuses(sequence, headroom):
            return False
        available, tree = self.available, self.tree
        known = sequence.length
        cached: list[int] = []
        node = tree.root
        if self.prefix_cache and not sequence.unread:
            cached, node = tree.match(sequence.ids(0, known - 1), sequence.salt)
            if (depth := self._usable(sequence, cached)) < len(cached):
                # What is known beyond that is computed again, into pages of the sequence's own.
                cached, node = tree.match(sequence.ids(0, depth * self.page_size), sequence.salt)
            tree.lock(node)  # before anything is evicted
        missing = self.pages_for(known) - len(cached)
        needed = missing + available - self.available  # found pages that nobody else uses are not evictable any more
        # Asked first, so that a sequence that has to wait does not empty the cache in vain.
        short, windows = needed + headroom > available, 0
        if self.windows is not None:
            free = self.windows.pages.available
            self.windows.resume(sequence, cached)
            windows = self.windows.wanted(sequence, missing) + free - self.windows.pages.available
            short |= windows + headroom > free
        if short or not self.reserve(missing):
            if self.windows is not None:
                self.windows.release(sequence)
            tree.unlock(node)
            self._refused = _Refusal(sequence, needed, windows, tree.changes)
            return False
        self._refused = None
        fresh = self.allocator.take(missing)
        sequence.pages = cached + fresh
        sequence.admitted = AdmittedPages(node, set(fresh), len(sequence.pages), tree.epoch)
        sequence.launched = sequence.computed = len(cached) * self.page_size
        return True

    def _usable(self, sequence: Sequence, cached: list[int]) -> int:
        """How many of a cached prefix's pages the sequence can go on behind: those where every kind of layer can."""
        sequence.shared_until = len(cached) * self.page_size
        depth = len(cached)
        while True:
            tried = depth
            if self.windows is not None:
                depth = self.windows.pages.deepest(cached[:depth])
            if self.snapshots is not None:
                depth = self.snapshots.resume(sequence, cached[:depth])
            if depth == tried or self.windows is None or self.snapshots is None:
                return depth

    def refuses(self, sequence: Sequence, headroom: int) -> bool:
        """Whether it is known without looking that the sequence cannot be admitted."""
        available, refused = self.available, self._refused
        if available <= headroom:
            return True  # at least one fresh page is needed
        if refused is None or refused.sequence is not sequence or refused.changes != self.tree.changes:
            return False
        short = self.windows is not None and refused.windows + headroom > self.windows.pages.available
        return short or refused.needed + headroom > available

    def grow(self, sequence: Sequence) -> int:
        """Append one fresh page, which `reserve` must have made free, and return it."""
        (page,) = self.allocator.take(1)
        sequence.pages.append(page)
        sequence.grown.add(page)
        return page

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Share the leader's full prompt pages with a sibling and give it a page of its own for the rest.

        Costs the same for any number of pages, but for the copy of their list. Returns the copy (source page,
        destination page) that the partly filled page needs, if there is one. `reserve(1)` must have succeeded.
        """
        full, partial = divmod(leader.launched, self.page_size)
        admitted = _admitted(leader)
        if admitted.pages > full:  # the first one to fork: the leader goes on in this page alone
            admitted.private.discard(leader.pages[full])
            leader.grown.add(leader.pages[full])
            admitted.pages = full
        admitted.holders += 1
        sibling.admitted = admitted
        sibling.pages = leader.pages[:full]
        sibling.launched, sibling.computed = leader.launched, leader.computed
        if not partial:
            return None
        return leader.pages[full], self.grow(sibling)

    def publish(self, sequence: Sequence) -> None:
        """Insert the full pages that a sequence was admitted with into the tree, as far as they are computed.

        Once one of those who hold them has done so, it costs the others nothing.
        """
        admitted = _admitted(sequence)
        node = self._insert(sequence, min(sequence.computed // self.page_size, admitted.pages))
        if node is not None:
            self.tree.lock(node)
            self.tree.unlock(admitted.node)
            admitted.node = node
        if self.snapshots is not None and self._accepts(sequence):
            self.snapshots.file(sequence, admitted.node)
        if self.windows is not None:
            if self._accepts(sequence):
                self.windows.file(sequence, admitted.node)
            self.windows.slide(sequence)

    def returnable(self, sequence: Sequence) -> int:
        """The number of pages that become available when the sequence gives back everything: those it alone holds."""
        pages = len(sequence.grown)
        admitted = _admitted(sequence)
        if admitted.holders == 1:
            pages += len(admitted.private)
            node: Node | None = admitted.node
            while node is not None and node.locks == 1:
                pages += len(node.pages)
                node = node.parent
        return pages

    def release(self, sequence: Sequence) -> None:
        """Give everything back: what is computed stays in the tree as cache, the rest becomes free."""
        admitted = _admitted(sequence)
        # The newest token's KV was never written, and `computed` does not count it. It counts more than the tokens
        # only where a stop string cut them.
        sequence.computed = min(sequence.computed, sequence.length)
        if admitted.holders > 1:
            self.publish(sequence)  # what others go on with stays locked
        node = self._insert(sequence, sequence.computed // self.page_size)
        if self.snapshots is not None:
            if self._accepts(sequence):
                self.snapshots.drop_older(sequence)
                self.snapshots.file(sequence, node or admitted.node)
            self.snapshots.release(sequence)
        if self.windows is not None:
            if self._accepts(sequence):
                self.windows.file(sequence, node or admitted.node)
            self.windows.release(sequence)
        for page in sequence.grown:
            self.allocator.release(page)
        admitted.holders -= 1
        if not admitted.holders:
            for page in admitted.private:
                self.allocator.release(page)
            self.tree.unlock(admitted.node)
        sequence.grown = set()
        sequence.pages = []
        sequence.admitted = None

    def _insert(self, sequence: Sequence, full: int) -> Node | None:
        """Insert the first `full` pages, all computed, into the tree: the node where they end, if it takes any.

        Nothing of a sequence that failed enters, nor what was begun before the cache was cleared.
        """
        admitted = _admitted(sequence)
        covered = admitted.node.depth
        if full <= covered or not self._accepts(sequence):
            return None
        pages = sequence.pages[covered:full]
        ids = sequence.ids(covered * self.page_size, full * self.page_size)
        node, taken = self.tree.insert(ids, pages, sequence.salt, admitted.node)
        # Where the tree already held another page the sequence keeps its own until it ends.
        gone = {page for page, is_gone in zip(pages, taken, strict=True) if is_gone}
        admitted.private -= gone
        sequence.grown -= gone
        return node

    def _accepts(self, sequence: Sequence) -> bool:
        """Whether anything of the sequence may enter the tree."""
        admitted = _admitted(sequence)
        return self.prefix_cache and sequence.cacheable and admitted.finite and admitted.epoch == self.tree.epoch


def _admitted(sequence: Sequence) -> AdmittedPages:
    if sequence.admitted is None:
        raise ValueError("a sequence without pages has none to share or to give back")
    return sequence.admitted

"""Allocates memory to sequences: pages from the free list or the radix tree, and memory of each `Holding`."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree
from aengine.scheduling.holding import UNBOUNDED, Holding
from aengine.scheduling.sequence import AdmittedPages, Sequence
from aengine.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The last sequence that did not fit. It cannot fit before the tree changes or more memory is available."""

    sequence: Sequence
    needed: int  # available pages that it needs; pages that others have locked do not count
    wanted: list[int]  # the same for each holding
    changes: int  # `RadixTree.changes` at that time


class SequenceMemory:
    """Moves pages between the allocator, the radix tree and sequences, and calls each `Holding` along the way.

    A page of a sequence belongs to the tree or is private. Pages of the tree are held by a lock on the node that covers
    them. Private pages belong to the choices that were admitted together or, if they were added later, to one sequence.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool, holdings: Seq[Holding] = ()) -> None:
        self.page_size = page_size
        self.holdings = holdings
        self.prefix_cache = prefix_cache and all(holding.reusable for holding in holdings)
        self.allocator = PageAllocator(num_pages)
        self.tree = RadixTree(self.allocator, page_size)
        self.tree.watchers += [holding.watcher for holding in holdings]
        self.usable_pages = num_pages - 1  # page 0 is reserved
        self._refused: _Refusal | None = None

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self.page_size)

    @property
    def available(self) -> int:
        """The number of pages that are free or can be made free by evicting."""
        return self.allocator.free + self.tree.evictable_pages

    @property
    def available_to_all(self) -> int:
        """The number of pages that are available in the pool and in every holding."""
        return min(self.available, *(holding.available for holding in self.holdings), UNBOUNDED)

    def reserve(self, pages: int) -> bool:
        """Free pages, evicting cached ones if necessary. Returns whether enough are free.

        Also returns False if a holding has fewer pages available.
        """
        for holding in self.holdings:
            if holding.available < pages:
                return False
        return self.reserve_pages(pages)

    def reserve_pages(self, pages: int) -> bool:
        """Free pages, evicting cached ones if necessary. Returns whether enough are free."""
        short = pages - self.allocator.free
        if short > 0:
            short -= self.tree.evict(short)
        return short <= 0

    # ---- admission ----------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, headroom: int) -> bool:
        """Allocate all pages of a sequence's known tokens: cached ones from the tree, fresh ones for the rest.

        At least the last token is left to compute. `headroom` pages must stay available. Returns False, and takes
        nothing, if the sequence does not fit. Calling this in every step is cheap: a sequence that did not fit is
        looked up again only after the tree has changed or more memory is available.
        """
        if self.refuses(sequence, headroom):
            return False
        available, tree = self.available, self.tree
        known = sequence.length
        cached: list[int] = []
        node = tree.root
        if self.prefix_cache and not sequence.needs_all_tokens:
            cached, node = tree.match(sequence.keys(0, known - 1), sequence.salt)
            sequence.shared_until = len(cached) * self.page_size
            if self.holdings and (depth := self._usable(cached)) < len(cached):
                # The sequence computes the tokens after that again, into private pages.
                cached, node = tree.match(sequence.keys(0, depth * self.page_size), sequence.salt)
            tree.lock(node)  # before anything is evicted
        missing = self.pages_for(known) - len(cached)
        needed = missing + available - self.available  # cached pages without other users are no longer evictable
        # Checked before evicting, so that a sequence that does not fit evicts nothing.
        short, wanted = needed + headroom > available, []
        for holding in self.holdings:
            before = holding.available
            holding.resume(sequence, cached)
            pages = holding.wanted(sequence, missing) + before - holding.available
            short |= pages + headroom > before
            wanted.append(pages)
        if short or not self.reserve_pages(missing):
            for holding in self.holdings:
                holding.release(sequence, None)
            tree.unlock(node)
            self._refused = _Refusal(sequence, needed, wanted, tree.changes)
            return False
        self._refused = None
        fresh = self.allocator.take(missing)
        sequence.pages = cached + fresh
        sequence.admitted = AdmittedPages(node, set(fresh), len(sequence.pages), tree.epoch)
        sequence.launched = sequence.computed = len(cached) * self.page_size
        return True

    def _usable(self, cached: Seq[int]) -> int:
        """Return the largest number of a cached prefix's pages that every holding can continue from."""
        depth = len(cached)
        while True:
            tried = depth
            for holding in self.holdings:
                depth = holding.usable(cached[:depth])
            if depth == tried or len(self.holdings) == 1:
                return depth

    def refuses(self, sequence: Sequence, headroom: int) -> bool:
        """Return whether the sequence surely cannot be admitted. Needs no lookup."""
        available, refused = self.available, self._refused
        if available <= headroom:
            return True  # at least one fresh page is needed
        if refused is None or refused.sequence is not sequence or refused.changes != self.tree.changes:
            return False
        return refused.needed + headroom > available or any(
            pages + headroom > holding.available for pages, holding in zip(refused.wanted, self.holdings, strict=True)
        )

    # ---- running ------------------------------------------------------------------------------------------

    def token_limit(self, sequence: Sequence, headroom: int) -> int:
        """Return for how many tokens every holding has memory now. `headroom` pages of each are left for others."""
        return min(holding.token_limit(sequence, headroom) for holding in self.holdings)

    def grow(self, sequence: Sequence, tokens: int, plan: StepPlan) -> None:
        """Take memory for the sequence's first `tokens` tokens. `reserve` must have freed the pages that it lacks."""
        while tokens > len(sequence.pages) * self.page_size:
            self._append_page(sequence, plan)
        for holding in self.holdings:
            holding.grow(sequence, tokens, plan)

    def _append_page(self, sequence: Sequence, plan: StepPlan) -> int:
        (page,) = self.allocator.take(1)
        plan.new_pages.append((sequence.row, len(sequence.pages), page))
        sequence.pages.append(page)
        sequence.grown.add(page)
        return page

    def fork(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> None:
        """Share the leader's full prompt pages with a sibling. Copy the partly filled page into a new one.

        Takes constant time, except for copying the list of pages. Both have rows, and `reserve(1)` must have succeeded.
        The plan tells the device to copy the page.
        """
        full, partial = divmod(leader.launched, self.page_size)
        admitted = _admitted(leader)
        if admitted.pages > full:  # the first fork: this page is the leader's alone
            admitted.private.discard(leader.pages[full])
            leader.grown.add(leader.pages[full])
            admitted.pages = full
        admitted.holders += 1
        sibling.admitted = admitted
        sibling.pages = leader.pages[:full]
        sibling.launched, sibling.computed = leader.launched, leader.computed
        if partial:
            plan.page_copies.append((leader.pages[full], self._append_page(sibling, plan)))
        for holding in self.holdings:
            holding.fork(leader, sibling, plan)

    # ---- the tree -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> None:
        """Insert the full and computed pages that a sequence was admitted with into the tree.

        If several choices hold these pages, only the first call inserts them.
        """
        admitted = _admitted(sequence)
        node = self._insert(sequence, min(sequence.computed // self.page_size, admitted.pages))
        if node is not None:
            self.tree.lock(node)
            self.tree.unlock(admitted.node)
            admitted.node = node
        if self.holdings:
            node = admitted.node if self._accepts(sequence) else None
            for holding in self.holdings:
                holding.publish(sequence, node)

    def returnable(self, sequence: Sequence) -> int:
        """Return how many pages become available when the sequence leaves. No other sequence holds them."""
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
        """Release all memory of a sequence. Full computed pages stay in the tree as cache; other pages become free."""
        admitted = _admitted(sequence)
        if admitted.holders > 1:
            self.publish(sequence)  # pages that others continue from stay locked
        node = self._insert(sequence, sequence.computed // self.page_size) or admitted.node
        for holding in self.holdings:
            holding.release(sequence, node if self._accepts(sequence) else None)
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
        """Insert the first `full` pages, all computed, into the tree. Returns the node where they end.

        Returns None if there is nothing to insert, or if `_accepts` does not allow it.
        """
        admitted = _admitted(sequence)
        covered = admitted.node.depth
        if full <= covered or not self._accepts(sequence):
            return None
        pages = sequence.pages[covered:full]
        ids = sequence.keys(covered * self.page_size, full * self.page_size)
        node, taken = self.tree.insert(ids, pages, sequence.salt, admitted.node)
        # If the tree already holds another page for the same tokens, the sequence keeps its own until it ends.
        gone = {page for page, is_gone in zip(pages, taken, strict=True) if is_gone}
        admitted.private -= gone
        sequence.grown -= gone
        return node

    def _accepts(self, sequence: Sequence) -> bool:
        """Return whether pages of the sequence may enter the tree.

        They may not if a step failed, or if the tree was cleared after admission."""
        admitted = _admitted(sequence)
        return self.prefix_cache and sequence.cacheable and admitted.finite and admitted.epoch == self.tree.epoch

    # ---- checks -------------------------------------------------------------------------------------------

    def check_holdings(self, holders: Collection[Sequence]) -> None:
        """Raise `AssertionError` if memory of any holding is lost or held twice. holders: the sequences on rows."""
        if not self.holdings:
            return
        cached: set[int] = set()
        nodes = [self.tree.root]
        while nodes:
            node = nodes.pop()
            cached.update(node.pages)
            nodes += node.children.values()
        for holding in self.holdings:
            holding.check_integrity(holders, cached)


def _admitted(sequence: Sequence) -> AdmittedPages:
    if sequence.admitted is None:
        raise ValueError("the sequence has no pages")
    return sequence.admitted

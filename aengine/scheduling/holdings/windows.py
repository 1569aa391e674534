"""Pages of sliding windows of each sequence: what it goes on from, takes for its next tokens, and gives back."""

from __future__ import annotations

from aengine.cache.radix import Node
from aengine.cache.windows import WindowPages, WindowRoom
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import NewPage


class SequenceWindows:
    """Moves pages of the window group between sequences and the tree.

    A sequence has a page for each of its pages behind `window_first`, up to what was launched of it; it takes them as
    its tokens are launched, a chunk at a time, and gives back those that no query will see any more once the tokens
    before are computed. Those of prompts are filed in the tree as soon as the tree has their tokens, those of outputs
    when the sequence leaves. Of what slid out the tree keeps as much as nobody needs, those pages last that end where
    the prompt ends, or where others have parted from it.
    """

    def __init__(self, room: WindowRoom, page_size: int) -> None:
        self.pages = WindowPages(room, page_size)
        self._page_size = page_size

    # ---- admission ----------------------------------------------------------------------------------------

    def resume(self, sequence: Sequence, cached: list[int]) -> None:
        """Let the sequence go on behind this prefix, whose length `WindowPages.deepest` has confirmed."""
        sequence.window_first, sequence.window_pages = self.pages.window_of(cached)
        sequence.window_filed = len(cached)
        sequence.window_shown = sequence.window_first
        self.pages.share(sequence.window_pages)

    def wanted(self, sequence: Sequence, missing: int) -> int:
        """How many pages must be there for the sequence to begin well, which is without `missing` of all its pages."""
        return max(1, min(missing, self.pages.steady - len(sequence.window_pages)))

    # ---- running ------------------------------------------------------------------------------------------

    def slide(self, sequence: Sequence) -> None:
        """Give back what lies behind every window, of tokens that are computed."""
        first = self.pages.kept_from(sequence.computed)
        count = first - sequence.window_first
        if count <= 0:
            return
        warm: list[tuple[int, int]] = []
        if sequence.window_first < sequence.window_filed:
            size = self._page_size
            borders = {(sequence.prompt_len - 1) // size, sequence.shared_until // size}
            warm = [(self.pages.seen_from(border * size), border) for border in borders]
        for place, page in enumerate(sequence.window_pages[:count], sequence.window_first):
            self.pages.release(page, spare=not any(start <= place < end for start, end in warm))
        del sequence.window_pages[:count]
        sequence.window_first = first

    def room(self, sequence: Sequence, headroom: int) -> int:
        """How many tokens there can be pages for; `headroom` pages stay for others where that leaves any."""
        available = self.pages.available
        most = max(available - headroom, min(available, 1))
        return (self._end(sequence) + most) * self._page_size

    def grow(self, sequence: Sequence, tokens: int) -> list[NewPage]:
        """Take pages for the sequence's first `tokens` tokens, and say what changes in its row's table."""
        self.slide(sequence)
        changes = [(sequence.row, place, 0) for place in range(sequence.window_shown, sequence.window_first)]
        sequence.window_shown = max(sequence.window_shown, sequence.window_first)
        end = self._end(sequence)
        missing = -(-tokens // self._page_size) - end
        if missing > 0:
            fresh = self.pages.take(missing)
            sequence.window_pages += fresh
            changes += [(sequence.row, place, page) for place, page in enumerate(fresh, end)]
        return changes

    def fork(self, leader: Sequence, sibling: Sequence) -> tuple[int, int] | None:
        """Share the leader's whole pages with a sibling, as `SequenceMemory.fork` does. The sibling takes a page for
        the rest, if there is one: the copy.
        """
        full, partial = divmod(leader.launched, self._page_size)
        sibling.window_first, sibling.window_filed = leader.window_first, leader.window_filed
        sibling.window_shown = leader.window_shown
        sibling.window_pages = leader.window_pages[: full - leader.window_first]
        self.pages.share(sibling.window_pages)
        if not partial:
            return None
        sibling.window_pages += self.pages.take(1)
        return leader.window_pages[full - leader.window_first], sibling.window_pages[-1]

    # ---- the tree -----------------------------------------------------------------------------------------

    def file(self, sequence: Sequence, node: Node) -> None:
        """Give the tree what the sequence has computed, as far as the way to `node` goes, which has its tokens."""
        first = max(sequence.window_filed, sequence.window_first)
        end = min(sequence.computed // self._page_size, node.depth, self._end(sequence))
        if first < end:
            start = sequence.window_first
            self.pages.file(node, first, sequence.window_pages[first - start : end - start])
            sequence.window_filed = end

    def release(self, sequence: Sequence) -> None:
        """Give everything back."""
        for page in reversed(sequence.window_pages):
            self.pages.release(page)
        sequence.window_pages = []
        sequence.window_first = sequence.window_shown = sequence.window_filed = 0

    def _end(self, sequence: Sequence) -> int:
        return sequence.window_first + len(sequence.window_pages)

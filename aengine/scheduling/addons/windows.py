"""The pages of sliding windows that sequences hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from aengine.cache.radix import Node
from aengine.cache.windows import WindowPages, WindowRoom
from aengine.scheduling.holding import Holding
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import NewRow, StepPlan


@dataclass(slots=True, eq=False)
class _Window:
    """The window pages of one sequence. Indices are entries of its page table."""

    first: int = 0  # index of the first page
    pages: list[int] = field(default_factory=list)
    first_on_device: int = 0  # the row's table on the device names no page before this index
    filed: int = 0  # every computed page before this index was filed in the tree

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class SequenceWindows(Holding):
    """Moves pages of the window group between sequences and the tree.

    A sequence takes window pages when its tokens are launched, one chunk at a time. When later tokens are computed, it
    frees the pages that no query will read again. Pages of a prompt are filed in the tree as soon as the tree has
    their tokens; pages of an output are filed when the sequence leaves. Freed pages that are filed stay in the tree
    until they are evicted. Pages at the end of the prompt, or at the end of a shared prefix, are evicted last.
    """

    def __init__(self, room: WindowRoom, page_size: int) -> None:
        self.pages = self.watcher = WindowPages(room, page_size)
        self._page_size = page_size
        self._windows: dict[Sequence, _Window] = {}

    @property
    def available(self) -> int:
        return self.pages.available

    # ---- admission ----------------------------------------------------------------------------------------

    def usable(self, cached: Seq[int]) -> int:
        return self.pages.usable_prefix(cached)

    def resume(self, sequence: Sequence, cached: Seq[int]) -> None:
        first, pages = self.pages.window_of(cached)
        self._windows[sequence] = _Window(first, pages, first_on_device=first, filed=len(cached))
        self.pages.share(pages)

    def wanted(self, sequence: Sequence, missing: int) -> int:
        return max(1, min(missing, self.pages.decode_pages - len(self._windows[sequence].pages)))

    def enter(self, sequence: Sequence, row: NewRow, plan: StepPlan) -> None:
        window = self._windows[sequence]
        row.window_pages = [0] * window.first + window.pages

    # ---- running ------------------------------------------------------------------------------------------

    def token_limit(self, sequence: Sequence, headroom: int) -> int:
        """Return the limit for the available pages. It allows one page even if that leaves less than `headroom`.

        Without that page the sequence might never continue.
        """
        available = self.pages.available
        most = max(available - headroom, min(available, 1))
        return (self._windows[sequence].end + most) * self._page_size

    def grow(self, sequence: Sequence, tokens: int, plan: StepPlan) -> None:
        window = self._windows[sequence]
        self._slide(sequence, window)
        freed = range(window.first_on_device, window.first)
        plan.new_window_pages += [(sequence.row, index, 0) for index in freed]
        window.first_on_device = max(window.first_on_device, window.first)
        sequence.has_stale_table = False
        missing = -(-tokens // self._page_size) - window.end
        if missing > 0:
            fresh = self.pages.take(missing)
            plan.new_window_pages += [(sequence.row, index, page) for index, page in enumerate(fresh, window.end)]
            window.pages += fresh

    def trim(self, sequence: Sequence) -> None:
        window = self._windows[sequence]
        self._slide(sequence, window)
        sequence.has_stale_table = window.first_on_device < window.first

    def fork(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> None:
        """Share the leader's full pages with the sibling. A partly filled page is copied to a new page."""
        window = self._windows[leader]
        full, partial = divmod(leader.launched, self._page_size)
        shared = window.pages[: full - window.first]
        self._windows[sibling] = forked = _Window(window.first, shared, window.first, window.filed)
        self.pages.share(shared)
        if partial:
            forked.pages += self.pages.take(1)
            plan.window_copies.append((window.pages[full - window.first], forked.pages[-1]))

    def _slide(self, sequence: Sequence, window: _Window) -> None:
        """Free the pages that no query of the sequence will read again."""
        first = self.pages.first_kept(sequence.computed)
        count = first - window.first
        if count <= 0:
            return
        last_evicted: list[tuple[int, int]] = []  # ranges of indices
        if window.first < window.filed:
            size = self._page_size
            borders = {(sequence.prompt_len - 1) // size, sequence.shared_until // size}
            last_evicted = [(self.pages.first_read(border * size), border) for border in borders]
        for index, page in enumerate(window.pages[:count], window.first):
            self.pages.release(page, evict_first=not any(start <= index < end for start, end in last_evicted))
        del window.pages[:count]
        window.first = first

    # ---- the tree -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, node: Node | None) -> None:
        window = self._windows[sequence]
        if node is not None:
            self._file(sequence, window, node)
        self.trim(sequence)

    def release(self, sequence: Sequence, node: Node | None) -> None:
        window = self._windows.pop(sequence)
        if node is not None:
            self._file(sequence, window, node)
        for page in reversed(window.pages):
            self.pages.release(page)
        sequence.has_stale_table = False

    def _file(self, sequence: Sequence, window: _Window, node: Node) -> None:
        """Give the computed pages on the path to `node` to the tree."""
        first = max(window.filed, window.first)
        end = min(sequence.computed // self._page_size, node.depth, window.end)
        if first < end:
            self.pages.file(node, first, window.pages[first - window.first : end - window.first])
            window.filed = end

    # ---- figures and checks -------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        pages = self.pages
        return {
            "window_pages": pages.usable,
            "window_pages_used": pages.usable - pages.available,
            "window_pages_cached": pages.idle,
        }

    def check_integrity(self, holders: Collection[Sequence], cached: set[int]) -> None:
        _require(self._windows.keys() == set(holders), "a sequence without a row has a window, or one with a row none")
        used: Counter[int] = Counter()
        for sequence, window in self._windows.items():
            used.update(window.pages)
            _require(window.first <= self.pages.first_read(sequence.computed), "a page that is still read was freed")
            _require(sequence.launched <= window.end * self._page_size, "tokens were launched without a window page")
            _require(len(set(window.pages)) == len(window.pages), "a page is twice in one table")
        self.pages.check_integrity(used, cached)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"windows: {message}")

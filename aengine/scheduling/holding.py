"""`Holding`: memory of one kind that sequences hold in addition to their pages of keys and values."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from aengine.cache.radix import Node, TreeWatcher
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

UNBOUNDED = 2**62  # pages or tokens: more than there ever are


class Holding:
    """Memory of one kind that sequences hold in addition to their pages. A model has none, one or several kinds.

    Pages are the spine: every model has them, and the radix tree is made of them. Memory of another kind is filed under
    the tree's pages and leaves the tree with them. `SequenceMemory` calls the methods below for each kind, in the order
    of a sequence's life. The scheduler names no kind.

    A kind overrides the methods that concern it. The others say that sequences need nothing of it at that point. A kind
    keeps its own table of sequences, with an entry from `resume` or `fork` until `release`.
    """

    watcher: TreeWatcher  # hears which pages leave the tree
    reusable: bool = True  # False: no sequence can continue from a cached prefix, so nothing is cached

    @property
    def available(self) -> int:
        """The number of pages that are free or can be made free by evicting."""
        return UNBOUNDED

    # ---- admission ----------------------------------------------------------------------------------------

    def usable(self, cached: Seq[int]) -> int:
        """Return how many of a cached prefix's pages a sequence can continue from.

        The kinds are called in turn, each with the prefix that the others allow, until all agree.
        """
        return len(cached)

    def resume(self, sequence: Sequence, cached: Seq[int]) -> None:
        """Hold the part that belongs to the cached prefix a sequence begins with. `usable` has confirmed its length.

        Followed by `release` if the sequence cannot be admitted after all.
        """

    def wanted(self, sequence: Sequence, missing: int) -> int:
        """Return how many pages must be available, after `resume`, for the sequence to begin.

        missing: the pages of keys and values that the prefix leaves to be computed.
        """
        return 0

    def enter(self, sequence: Sequence, row: NewRow, plan: StepPlan) -> None:
        """Describe to the device what a sequence on a new row begins with."""

    # ---- running ------------------------------------------------------------------------------------------

    def room(self, sequence: Sequence, headroom: int) -> int:
        """Return up to which token position there can be memory now; `headroom` pages are left for others."""
        return UNBOUNDED

    def grow(self, sequence: Sequence, tokens: int, plan: StepPlan) -> None:
        """Take memory for the sequence's first `tokens` tokens, and add what changes on the device to the plan."""

    def save(self, sequence: Sequence, plan: StepPlan, chunk: PrefillChunk | None) -> None:
        """Plan to keep what a step leaves at borders of pages.

        chunk: the part of a prompt that the step reads. None means that it decodes, and fills a page.
        """

    def fork(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> None:
        """Let a sibling share what its leader holds. Both have their rows, and one page is available."""

    # ---- the tree -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, node: Node | None) -> None:
        """File what the sequence has computed, as far as the path to `node` goes. Free memory that it no longer needs.

        node: None means that nothing of the sequence may enter the tree.
        """

    def release(self, sequence: Sequence, node: Node | None) -> None:
        """File as `publish` does, then free everything that the sequence still holds."""

    # ---- figures and checks -------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the fields of `Stats` that belong to this kind."""
        return {}

    def check_integrity(self, holders: Collection[Sequence], cached: set[int]) -> None:
        """Raise `AssertionError` if memory of this kind is lost or held twice.

        holders: the sequences with a row. cached: all pages of the tree.
        """

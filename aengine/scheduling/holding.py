"""`Holding`: memory of one kind that sequences hold in addition to their pages of keys and values."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from aengine.cache.radix import Node, TreeWatcher
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import NewRow, PrefillChunk, StepPlan

UNBOUNDED = 2**62  # pages or tokens; larger than any real number of them


class Holding:
    """Memory of one kind that sequences hold in addition to their pages. A model has none, one or several kinds.

    Every model has pages of keys and values, and the radix tree consists of them. Memory of another kind is filed under
    the tree's pages and leaves the tree with them. `SequenceMemory` calls the methods below for each kind, in the order
    of a sequence's life. The scheduler treats all kinds alike.

    A kind overrides the methods that it needs; the defaults do nothing and need no memory. A kind keeps its own table
    of sequences, with an entry from `resume` or `fork` until `release`.
    """

    watcher: TreeWatcher  # called when pages leave the tree
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
        """Take the memory that belongs to the pages `cached`, the cached prefix that a sequence begins with.

        `usable` has confirmed their number. If the sequence cannot be admitted, `release` follows.
        """

    def wanted(self, sequence: Sequence, missing: int) -> int:
        """Return how many pages must be available, after `resume`, for the sequence to begin.

        missing: the number of pages of keys and values after the cached prefix.
        """
        return 0

    def enter(self, sequence: Sequence, row: NewRow, plan: StepPlan) -> None:
        """Add to the row and the plan what the device needs before the first step of a sequence on a new row."""

    # ---- running ------------------------------------------------------------------------------------------

    def token_limit(self, sequence: Sequence, headroom: int) -> int:
        """Return for how many tokens of a sequence memory can be taken now. `headroom` pages are left for others."""
        return UNBOUNDED

    def grow(self, sequence: Sequence, tokens: int, plan: StepPlan) -> None:
        """Take memory for the sequence's first `tokens` tokens, and add the changed tables to the plan."""

    def save(self, sequence: Sequence, plan: StepPlan, chunk: PrefillChunk | None) -> None:
        """Plan to save what a step computes at the ends of pages.

        chunk: the chunk of a prompt that the step computes. None: the step decodes, and its token fills a page. With
            drafts, the step may also end before or after a page's end.
        """

    def trim(self, sequence: Sequence) -> None:
        """Free memory that no later token of the sequence will read."""

    def fork(self, leader: Sequence, sibling: Sequence, plan: StepPlan) -> None:
        """Let a sibling share the memory of its leader. Both have rows, and one page is available."""

    # ---- the tree -----------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence, node: Node | None) -> None:
        """File computed memory under the tree's pages on the path to `node`. Free memory that is no longer needed.

        node: None: nothing of the sequence may enter the tree.
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

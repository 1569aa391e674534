"""Snapshots of recurrent states: bookkeeping of the slots behind the rows' own.

A snapshot is the state behind the last token of a page. A page of the radix tree stands for all that was read up to its
end, so the tree's snapshots are filed under its pages, and go with them. Nobody who runs reads a snapshot: its state is
copied into the row's slot before the row's first step, so that any of them may be evicted at any time, and the least
recently used one is where a new one needs its slot.

Slot 0 is nobody's; row r has slot r + 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from aengine.cache.radix import Namespace, Node


def slot_of(row: int) -> int:
    """A row's slot."""
    return row + 1


@dataclass(frozen=True, slots=True)
class SnapshotRoom:
    """How many snapshots there are, and where they are taken: multiples of a page, and of what kernels can save at."""

    count: int = 0
    grain: int = 64  # tokens: between those of an output; the last one of a prompt, and of what others share, as well
    prompt_grain: int = 64  # tokens: between those of a prompt


class Snapshots:
    """Hands out slots to sequences, and files those that sequences give to the tree. It has to watch the tree."""

    def __init__(self, room: SnapshotRoom, first_slot: int, page_size: int) -> None:
        if room.grain % page_size or room.prompt_grain % room.grain:
            raise ValueError(f"snapshots every {room.grain} and {room.prompt_grain} tokens, in pages of {page_size}")
        self.room = room
        self.evictions = 0  # for another's sake; not those that went with their pages
        self._step = room.grain // page_size  # pages
        self._free = list(range(first_slot + room.count - 1, first_slot - 1, -1))
        self._filed: OrderedDict[int, int] = OrderedDict()  # by page: slot; the least recently used first

    @property
    def filed(self) -> int:
        """How many the tree has."""
        return len(self._filed)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Hand out a slot, the least recently used snapshot's if none is free. None: sequences have all of them."""
        if self._free:
            return self._free.pop()
        if not self._filed:
            return None
        self.evictions += 1
        return self._filed.popitem(last=False)[1]

    def release(self, slot: int) -> None:
        """Take back a slot that was handed out."""
        self._free.append(slot)

    def deepest(self, pages: Sequence[int]) -> tuple[int, int]:
        """How many of a cached prefix's pages the deepest snapshot covers, and its slot; (0, 0): there is none.

        Counts as a use.
        """
        for depth in range(len(pages) // self._step * self._step, 0, -self._step):
            slot = self._filed.get(pages[depth - 1])
            if slot is not None:
                self._filed.move_to_end(pages[depth - 1])
                return depth, slot
        return 0, 0

    def file(self, node: Node, depth: int, slot: int) -> None:
        """Give a slot that was handed out to the tree: the state behind the first `depth` pages of the way to `node`.

        Where the tree has one already it is free again. Raises `ValueError` if the way is shorter.
        """
        if not 0 < depth <= node.depth:
            raise ValueError(f"the way to the node has {node.depth} pages, not {depth}")
        while depth <= node.depth - len(node.pages):
            if node.parent is None:
                raise ValueError("the node is no longer in the tree")
            node = node.parent
        page = node.pages[depth - 1 - node.depth]
        if page in self._filed:
            self.release(slot)
        else:
            self._filed[page] = slot
        self._filed.move_to_end(page)

    # ---- what it hears of the tree ------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """A run without snapshots: they come later."""

    def removed(self, pages: Sequence[int]) -> None:
        for page in pages:
            slot = self._filed.pop(page, None)
            if slot is not None:
                self._free.append(slot)

    def cleared(self) -> None:
        self.removed(list(self._filed))

    def check_integrity(self, first_slot: int, owned: Sequence[int], cached: set[int]) -> None:
        """Raise `AssertionError` unless every slot is free, a sequence's (`owned`) or filed under a cached page."""
        slots = sorted([*self._free, *self._filed.values(), *owned])
        if slots != list(range(first_slot, first_slot + self.room.count)):
            raise AssertionError(f"snapshots: slots are shared or lost: {slots}")
        if not self._filed.keys() <= cached:
            raise AssertionError("snapshots: one is filed under a page that the tree does not hold")

"""Bookkeeping of the slots that hold snapshots of recurrent states. They follow the slots of the rows.

A snapshot is the state after the last token of a page. The tree files snapshots under its pages, and drops them with
their pages. A running sequence never reads a snapshot: its state is copied into the row's slot before the row's first
step. So a snapshot may be evicted at any time. A new snapshot takes the slot of the least recently used one if no slot
is free.

Slot 0 is unused; row r has slot r + 1.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from aengine.cache.radix import Namespace, Node


def slot_of(row: int) -> int:
    """Return the slot of a row."""
    return row + 1


@dataclass(frozen=True, slots=True)
class SnapshotRoom:
    """The number of snapshots, and the token positions at which they are taken.

    Both distances are multiples of a page and of the block of tokens after which kernels can save a state.
    """

    count: int = 0
    grain: int = 64  # tokens between snapshots of an output; all snapshots are at multiples of this
    prompt_grain: int = 64  # tokens between snapshots of a prompt


class Snapshots:
    """Hands out slots to sequences, and files the snapshots that they give to the tree. Must watch the tree."""

    def __init__(self, room: SnapshotRoom, first_slot: int, page_size: int) -> None:
        if room.grain % page_size or room.prompt_grain % room.grain:
            raise ValueError(f"snapshots every {room.grain} and {room.prompt_grain} tokens, in pages of {page_size}")
        self.room = room
        self.evictions = 0  # snapshots evicted for another; those that leave with their pages do not count
        self._step = room.grain // page_size  # in pages
        self._free = list(range(first_slot + room.count - 1, first_slot - 1, -1))
        self._filed: OrderedDict[int, int] = OrderedDict()  # page -> slot; the least recently used first

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """Hand out a slot, after evicting a snapshot if none is free. Returns None if sequences hold all slots."""
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
        """Return the number of pages before the last snapshot in a cached prefix, and its slot; (0, 0) without one.

        This counts as a use.
        """
        for depth in range(len(pages) // self._step * self._step, 0, -self._step):
            slot = self._filed.get(pages[depth - 1])
            if slot is not None:
                self._filed.move_to_end(pages[depth - 1])
                return depth, slot
        return 0, 0

    def file(self, node: Node, depth: int, slot: int) -> None:
        """Give a slot to the tree. It holds the state after the first `depth` pages of the path to `node`.

        If the tree has such a snapshot already, the slot becomes free. Raises `ValueError` if the path is shorter.
        """
        if not 0 < depth <= node.depth:
            raise ValueError(f"the path to the node has {node.depth} pages, not {depth}")
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

    # ---- events of the tree ------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """Do nothing: snapshots of a new run are filed later."""

    def removed(self, pages: Sequence[int]) -> None:
        for page in pages:
            slot = self._filed.pop(page, None)
            if slot is not None:
                self._free.append(slot)

    def cleared(self) -> None:
        self.removed(list(self._filed))

    def check_integrity(self, first_slot: int, owned: Sequence[int], cached: set[int]) -> None:
        """Raise `AssertionError` unless every slot is free, held by a sequence (`owned`), or filed."""
        slots = sorted([*self._free, *self._filed.values(), *owned])
        if slots != list(range(first_slot, first_slot + self.room.count)):
            raise AssertionError(f"snapshots: slots are shared or lost: {slots}")
        if not self._filed.keys() <= cached:
            raise AssertionError("snapshots: a snapshot is filed under a page that the tree does not hold")

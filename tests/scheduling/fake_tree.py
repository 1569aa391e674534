"""Watches the radix tree: the pages that enter it must hold exactly the tokens under which they are filed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq

from aengine.cache.radix import Namespace
from tests.scheduling.fake_model import Prefixes


class TreeChecker:
    """`TreeWatcher` that compares pages with their tokens. A slot of a page has the prefix that ends in its token."""

    def __init__(self, slots: list[int], prefixes: Prefixes, page_size: int) -> None:
        self._slots = slots
        self._prefixes = prefixes
        self._size = page_size

    def stored(self, before: int | None, token_ids: bytes, pages: Seq[int], salt: Namespace) -> None:
        ids = array("I")
        ids.frombytes(token_ids)
        size = self._size
        prefix = None if before is None else self._slots[before * size + size - 1]
        for place, token_id in enumerate(ids):
            page = pages[place // size]
            found = self._slots[page * size + place % size]
            if found < 0:
                raise AssertionError(f"page {page} enters the tree with {found} at {place % size}")
            if self._prefixes.last[found] != token_id:
                raise AssertionError(f"page {page} enters the tree with another token at {place % size}")
            if prefix is not None and self._prefixes.before[found] != prefix:
                raise AssertionError(f"page {page} enters the tree after another prefix than its own")
            prefix = found

    def removed(self, pages: Seq[int]) -> None:
        """Do nothing: a page that is freed is poisoned."""

    def cleared(self) -> None:
        """Do nothing: rows compare eras."""

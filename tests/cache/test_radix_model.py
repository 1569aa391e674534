"""The radix tree against a simple model: one entry for each cached page."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Node, RadixTree

PAGE = 2
NUM_PAGES = 18  # far fewer than the rules request
Prefix = tuple[int, str | None, tuple[int, ...]]  # an epoch, a salt and whole pages of ids


@dataclass
class Entry:
    page: int
    last_use: tuple[int, int]  # time, then deepest first
    locks: int = 0


class NaiveCache:
    """A dict from each cached page-aligned prefix to the page that ends it."""

    def __init__(self) -> None:
        self.entries: dict[Prefix, Entry] = {}
        self.time = 0
        self.epoch = 0

    def prefixes(self, ids: list[int], salt: str | None) -> list[Prefix]:
        return [(self.epoch, salt, tuple(ids[:end])) for end in range(PAGE, len(ids) + 1, PAGE)]

    def match(self, ids: list[int], salt: str | None) -> list[Prefix]:
        found: list[Prefix] = []
        for prefix in self.prefixes(ids, salt):
            if prefix not in self.entries:
                break
            found.append(prefix)
        self.touch(found)
        return found

    def touch(self, path: list[Prefix]) -> None:
        self.time += 1
        for depth, prefix in enumerate(path):
            self.entries[prefix].last_use = (self.time, -depth)

    def insert(self, ids: list[int], salt: str | None, pages: list[int]) -> list[bool]:
        path = self.prefixes(ids, salt)[: len(pages)]
        for prefix, page in zip(path, pages):
            self.entries.setdefault(prefix, Entry(page, (0, 0)))
        self.touch(path)
        return [self.entries[prefix].page == page for prefix, page in zip(path, pages)]

    def clear(self) -> None:
        self.epoch += 1
        self.drop_old()

    def drop_old(self) -> None:
        """Drop entries of old epochs that are no longer held."""
        for prefix in [p for p, entry in self.entries.items() if p[0] != self.epoch and not entry.locks]:
            del self.entries[prefix]

    def oldest(self) -> Prefix | None:
        unlocked = [prefix for prefix, entry in self.entries.items() if entry.locks == 0]
        return min(unlocked, key=lambda prefix: self.entries[prefix].last_use, default=None)


@dataclass
class Sequence:
    """The pages of a running request: a locked node, and private pages that follow it or duplicate it."""

    ids: list[int]
    salt: str | None
    pages: list[int]
    taken: list[bool]
    node: Node
    epoch: int
    locked: list[Prefix] = field(default_factory=list)


token_ids = st.lists(st.integers(0, 1), min_size=0, max_size=12)  # two tokens, so that prefixes are often shared
salts = st.sampled_from([None, None, "a", "b"])


class RadixMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.tree = RadixTree(self.allocator, PAGE)
        self.model = NaiveCache()
        self.running: list[Sequence] = []

    def some_running(self, data: st.DataObject) -> Sequence:
        return self.running[data.draw(st.integers(0, len(self.running) - 1))]

    def evict_model(self, n: int) -> int:
        """Drop the model's oldest entries until n pages would be free."""
        came_back = 0
        while came_back < n and (prefix := self.model.oldest()) is not None:
            del self.model.entries[prefix]
            came_back += 1
        return came_back

    def take(self, n: int) -> list[int] | None:
        missing = n - self.allocator.free
        if missing > 0:
            expected = self.evict_model(missing)
            assert self.tree.evict(missing) == expected
        return self.allocator.take(n) if self.allocator.free >= n else None

    def relock(self, sequence: Sequence, node: Node, path: list[Prefix]) -> None:
        """Lock the new path before the old one is unlocked."""
        self.tree.lock(node)
        for prefix in path:
            self.model.entries[prefix].locks += 1
        self.unlock(sequence)
        sequence.node, sequence.locked = node, path

    def unlock(self, sequence: Sequence) -> None:
        self.tree.unlock(sequence.node)
        for prefix in sequence.locked:
            self.model.entries[prefix].locks -= 1
        self.model.touch(sequence.locked)
        self.model.drop_old()

    @rule(ids=token_ids, salt=salts)
    def look(self, ids: list[int], salt: str | None) -> None:
        pages, node = self.tree.match(ids, salt)
        assert pages == [self.model.entries[prefix].page for prefix in self.model.match(ids, salt)]
        assert node.depth == len(pages)

    @rule(ids=token_ids, salt=salts)
    def admit(self, ids: list[int], salt: str | None) -> None:
        """Match, lock, and find pages for the rest, or unlock again."""
        pages, node = self.tree.match(ids, salt)
        path = self.model.match(ids, salt)
        assert pages == [self.model.entries[prefix].page for prefix in path]
        sequence = Sequence(ids, salt, pages, [True] * len(pages), self.tree.root, self.tree.epoch)
        self.relock(sequence, node, path)
        own = self.take(len(ids) // PAGE - len(pages))
        if own is None:
            self.unlock(sequence)
            return
        sequence.pages = pages + own
        sequence.taken += [False] * len(own)
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def commit_some(self, data: st.DataObject) -> None:
        """A chunk was computed. Its full pages enter the tree after the locked node."""
        sequence = self.some_running(data)
        begin = sequence.node.depth
        count = data.draw(st.integers(begin, len(sequence.pages)))
        ids, pages = sequence.ids[begin * PAGE :], sequence.pages[begin:count]
        if sequence.epoch != self.tree.epoch:
            if sequence.node is not self.tree.root:
                with pytest.raises(ValueError, match="no longer in the tree"):
                    self.tree.insert(ids, pages, sequence.salt, sequence.node)
            return
        node, taken = self.tree.insert(ids, pages, sequence.salt, sequence.node)
        assert taken == self.model.insert(sequence.ids, sequence.salt, sequence.pages[:count])[begin:]
        assert node.depth == count
        sequence.taken[begin:count] = taken
        self.relock(sequence, node, self.model.prefixes(sequence.ids, sequence.salt)[:count])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = self.some_running(data)
        self.running.remove(sequence)
        for page, taken in zip(sequence.pages, sequence.taken):
            if not taken:
                self.allocator.release(page)
        self.unlock(sequence)

    @rule(ids=token_ids, salt=salts)
    def insert_from_the_root(self, ids: list[int], salt: str | None) -> None:
        """Insert a run of which the caller owns all pages."""
        pages = self.take(len(ids) // PAGE)
        if pages is None:
            return
        node, taken = self.tree.insert(ids, pages, salt)
        assert taken == self.model.insert(ids, salt, pages)
        assert node.depth == len(pages)
        for page, in_tree in zip(pages, taken):
            if not in_tree:
                self.allocator.release(page)

    @rule(n=st.integers(0, 8))
    def evict(self, n: int) -> None:
        expected = self.evict_model(n)
        assert self.tree.evict(n) == expected

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        self.model.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.tree.check_integrity()
        self.allocator.check_integrity()
        assert self.tree.cached_pages == len(self.model.entries)
        assert self.tree.evictable_pages == sum(entry.locks == 0 for entry in self.model.entries.values())
        assert self.contents() == {prefix: entry.page for prefix, entry in self.model.entries.items()}

    def contents(self) -> dict[Prefix, int]:
        """Return all entries of the tree without using them."""
        found: dict[Prefix, int] = {}

        def walk(node: Node, above: tuple[int, str | None], ids: tuple[int, ...]) -> None:
            for key, child in node.children.items():
                below = key[:2] if isinstance(key, tuple) else above
                mine = tuple(memoryview(child.data).cast("I"))
                for i, page in enumerate(child.pages, 1):
                    found[*below, ids + mine[: i * PAGE]] = page
                walk(child, below, ids + mine)

        walk(self.tree.root, (0, None), ())
        return found

    def teardown(self) -> None:
        """At idle, each page is free or cached, and none is locked."""
        for sequence in self.running:
            for page, taken in zip(sequence.pages, sequence.taken):
                if not taken:
                    self.allocator.release(page)
            self.unlock(sequence)
        self.agrees_with_the_model()
        assert self.allocator.free + self.tree.cached_pages == NUM_PAGES - 1
        assert self.tree.evictable_pages == self.tree.cached_pages


TestRadixTreeAgainstAModel = RadixMachine.TestCase
TestRadixTreeAgainstAModel.settings = settings(stateful_step_count=80)

"""The prefix cache: a radix tree over page-aligned runs of token ids.

A node holds a run of one or more whole pages. Two children of a node differ within their first page. The tree owns
its pages, and returns them to the allocator when they are evicted.

A path that a sequence uses is locked: `lock(node)` adds one to every node up to the root, so an unlocked node has only
unlocked descendants. Unlocked nodes are kept in one least-recently-used order. A use (a match, an insert, an unlock)
moves its path to the end of the order, the deepest node first. Therefore every node comes before its parent, and the
first entry is always a leaf. Eviction begins with the first entry.

Clearing begins a new epoch. Nodes that are locked at that time keep the old epoch, and lookups ignore them. They
leave the tree when they are unlocked.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from aengine.cache.pages import PageAllocator

# A run's ids are bytes, 4 per token. Bytes are compared with memcmp, hash fast, and the garbage collector skips them.
_ID_TYPE = "I"
_ID_BYTES = array(_ID_TYPE).itemsize


# Runs with different namespaces are never shared. A namespace is a tenant's salt, or a pair of
# a number and the salt. The number is the adapter's generation. With longrope, sequences that may leave the trained
# context have its negative, or 0 without an adapter. Runs of an unloaded adapter are evicted like any others.
Namespace = str | None | tuple[int, str | None]

# The key of a child: its first page's ids. Keys under the root also contain the epoch and the namespace, so one
# root serves all epochs, tenants and adapters.
_Key = bytes | tuple[int, Namespace, bytes]


def packed(token_ids: Iterable[int]) -> array[int]:
    """Return token ids as an array of 4 bytes each, which the tree compares as bytes."""
    return array(_ID_TYPE, token_ids)


class Node:
    """A run of whole pages. Callers keep nodes to lock them; only the tree changes them."""

    __slots__ = ("backed", "children", "data", "depth", "epoch", "key", "locks", "pages", "parent")

    def __init__(
        self, parent: Node | None, key: _Key, data: bytes, pages: list[int], depth: int, locks: int, epoch: int = 0
    ) -> None:
        self.parent = parent  # None: the root, or no longer in the tree
        self.key = key
        self.data = data  # the ids of the run
        self.pages = pages
        self.depth = depth  # pages from the root to the end of this run
        self.locks = locks
        self.epoch = epoch  # the tree's epoch when the run was inserted
        self.backed = False  # set by the tiers: all its pages are in host memory or are being copied there
        self.children: dict[_Key, Node] = {}


class Match(NamedTuple):
    """The longest cached prefix of a lookup. `pages` are the pages from the root to the end of `node`.

    The pages stay valid only if `node` is locked before anything is evicted.
    """

    pages: list[int]
    node: Node


class Inserted(NamedTuple):
    """The result of an insertion.

    node: the node at whose end the run ends. taken: for each page of the run, whether the tree now owns it. The caller
    still owns the other pages and has to release them.
    """

    node: Node
    taken: list[bool]


class TreeWatcher(Protocol):
    """Callbacks for runs that enter or leave a tree. A page holds the same tokens until it is removed."""

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """A run was attached after the page `before`. None: it was attached at the root. token_ids: 4 bytes each."""
        ...

    def removed(self, pages: Sequence[int]) -> None:
        """Pages have left the tree. The last pages of a run leave first."""
        ...

    def cleared(self) -> None:
        """The tree was cleared. Locked pages are removed later."""
        ...


class RadixTree:
    """Shares the pages of common prefixes. The time of an operation grows with the nodes and pages that it visits."""

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.page_size = page_size
        self.cached_pages = 0  # number of pages in the tree
        self.evictable_pages = 0  # number of these that are not locked
        self.epoch = 0  # the number of times that the tree was cleared
        self.changes = 0  # rises when a lookup may find more, or more pages may be evicted
        self.root = Node(None, b"", b"", [], 0, 0)
        self.watchers: list[TreeWatcher] = []
        self._allocator = allocator
        self._page_bytes = page_size * _ID_BYTES
        self._unlocked: OrderedDict[Node, None] = OrderedDict()  # oldest use first

    def match(self, token_ids: Sequence[int], salt: Namespace = None) -> Match:
        """Find the longest cached page-aligned prefix of token_ids among runs inserted under the same salt."""
        node = self._descend(self.root, self._pack(token_ids, len(token_ids) // self.page_size), salt)
        self._touch(node)
        runs = [step.pages for step in self._path(node)]
        return Match([page for run in reversed(runs) for page in run], node)

    def lock(self, node: Node) -> None:
        """Protect the path from the root to node from eviction. Raises `ValueError` if node was evicted."""
        if node.parent is None and node is not self.root:
            raise ValueError("the node is no longer in the tree")
        for step in self._path(node):
            if step.locks == 0:
                del self._unlocked[step]
                self.evictable_pages -= len(step.pages)
                self.changes += 1
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock(node)`. This counts as a use. Nodes of an old epoch leave the tree.

        Raises `ValueError` if node is not locked.
        """
        if node.locks == 0 and node is not self.root:
            raise ValueError("the node is not locked")
        for step in self._path(node):
            step.locks -= 1
            if step.locks == 0:
                self._unlocked[step] = None
                self.evictable_pages += len(step.pages)
                self.changes += 1
                if step.epoch != self.epoch:  # its descendants are unlocked too, so they have left already
                    self._cut(step, len(step.pages))

    def insert(
        self, token_ids: Sequence[int], pages: Sequence[int], salt: Namespace = None, below: Node | None = None
    ) -> Inserted:
        """Cache a run: pages[i] holds the KV of token_ids[i * page_size : (i + 1) * page_size].

        The run begins at the end of `below`, a node that the caller has locked, or at the root. Ids beyond the last
        page are ignored. The caller owns the pages. The tree takes the pages of tokens that it does not hold yet.

        Raises `ValueError` if ids are missing, or if `below` is no longer in the tree or belongs to an old epoch.
        """
        start = self.root if below is None else below
        count = len(pages)
        if len(token_ids) < count * self.page_size:
            raise ValueError(f"{count} pages need {count * self.page_size} ids, got {len(token_ids)}")
        if start is not self.root and (start.parent is None or start.epoch != self.epoch):
            raise ValueError("the node that the run should follow is no longer in the tree")
        data = self._pack(token_ids, count)
        node = self._descend(start, data, salt)
        taken = self._compare(node, start, pages)
        found = node.depth - start.depth
        if found < count:
            rest = data[found * self._page_bytes :]
            parent = node
            node = self._attach(parent, self._key(parent, rest[: self._page_bytes], salt), rest, list(pages[found:]))
            for watcher in self.watchers:
                watcher.stored(parent.pages[-1] if parent.pages else None, rest, node.pages, salt)
        self._touch(node)
        return Inserted(node, taken)

    def evict(self, n: int) -> int:
        """Release the n least recently used unlocked pages, or all if there are fewer. Returns the number released.

        The deepest pages are released first. A run that is only partly needed keeps its beginning.
        """
        before = self._allocator.free
        while self._unlocked and (missing := n + before - self._allocator.free) > 0:
            self._cut(next(iter(self._unlocked)), missing)
        return self._allocator.free - before

    def next_evicted(self) -> Iterator[Node]:
        """Iterate over the unlocked nodes in eviction order. The tree must not be used during the iteration."""
        return iter(self._unlocked)

    def clear(self) -> None:
        """Drop all cached runs: unlocked pages now, locked pages when they are unlocked.

        Later lookups find none of them.
        """
        self.epoch += 1
        self.changes += 1
        for watcher in self.watchers:
            watcher.cleared()
        while self._unlocked:
            leaf = next(iter(self._unlocked))
            self._cut(leaf, len(leaf.pages))

    def _pack(self, token_ids: Sequence[int], count: int) -> bytes:
        """Return the ids of the first `count` pages as bytes."""
        return packed(token_ids[: count * self.page_size]).tobytes()

    def _key(self, parent: Node, first_page: bytes, salt: Namespace) -> _Key:
        return (self.epoch, salt, first_page) if parent is self.root else first_page

    def _path(self, node: Node) -> Iterator[Node]:
        """Iterate over the nodes from `node` up to the root, without the root."""
        step: Node | None = node
        while step is not None and step is not self.root:
            parent = step.parent  # read before the caller removes the node
            yield step
            step = parent

    def _descend(self, node: Node, data: bytes, salt: Namespace) -> Node:
        """Return the deepest node below `node` whose path agrees with `data`. Split a node that agrees only in part."""
        size = self._page_bytes
        at = 0
        while at < len(data):
            child = node.children.get(self._key(node, data[at : at + size], salt))
            if child is None:
                break
            if data.startswith(child.data, at):
                node = child
                at += len(child.data)
                continue
            low, high = 1, len(child.pages)  # pages [0, low) agree, pages [0, high) do not
            while high - low > 1:
                middle = (low + high) // 2
                if data.startswith(child.data[low * size : middle * size], at + low * size):
                    low = middle
                else:
                    high = middle
            return self._split(child, low)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Move the first `at` pages of a node into a new node above it. Returns the new node.

        `node` keeps the lower half, because callers that locked it hold its end. The upper half gets the same locks.
        """
        parent = node.parent
        if parent is None:
            raise ValueError("the root has no pages to split")
        depth = node.depth - len(node.pages) + at
        upper = Node(parent, node.key, b"", node.pages[:at], depth, node.locks, node.epoch)
        upper.backed = node.backed
        upper.data, node.data = node.data[: at * self._page_bytes], node.data[at * self._page_bytes :]
        parent.children[node.key] = upper
        node.key = node.data[: self._page_bytes]
        node.parent = upper
        node.pages = node.pages[at:]
        upper.children[node.key] = node
        if upper.locks == 0:
            self._unlocked[upper] = None
        return upper

    def _attach(self, parent: Node, key: _Key, data: bytes, pages: list[int]) -> Node:
        """Add an unlocked leaf."""
        node = Node(parent, key, data, pages, parent.depth + len(pages), 0, self.epoch)
        parent.children[key] = node
        self.changes += 1
        self._unlocked[node] = None
        self.cached_pages += len(pages)
        self.evictable_pages += len(pages)
        return node

    def _compare(self, node: Node, start: Node, pages: Sequence[int]) -> list[bool]:
        """Return for each page after `start` whether the tree owns it, or will own it because it is after `node`."""
        taken = [True] * len(pages)
        for step in self._path(node):
            if step is start:
                break
            first = step.depth - len(step.pages) - start.depth
            for index, page in enumerate(step.pages, first):
                taken[index] = pages[index] == page
        return taken

    def _touch(self, node: Node) -> None:
        """Make the path to node the most recently used. Locked nodes and their ancestors are in no order."""
        for step in self._path(node):
            if step.locks:
                break
            self._unlocked.move_to_end(step)

    def _cut(self, leaf: Node, count: int) -> None:
        """Release the last `count` pages of an unlocked leaf, or the whole leaf."""
        kept = max(len(leaf.pages) - count, 0)
        gone = leaf.pages[kept:]
        self.cached_pages -= len(gone)
        self.evictable_pages -= len(gone)
        if kept:
            del leaf.pages[kept:]
            leaf.data = leaf.data[: kept * self._page_bytes]
            leaf.depth -= len(gone)
        else:
            del self._unlocked[leaf]
            if leaf.parent is not None:
                del leaf.parent.children[leaf.key]
            leaf.parent = None
        for page in gone:
            self._allocator.release(page)
        for watcher in self.watchers:
            watcher.removed(gone)

    def check_integrity(self) -> None:
        """Walk the whole tree. Raise `AssertionError` if an invariant is broken."""
        order = {node: i for i, node in enumerate(self._unlocked)}
        held: set[int] = set()
        evictable = unlocked = 0
        stack = list(self.root.children.values())
        for node in stack:
            _require(node.parent is self.root and isinstance(node.key, tuple), "a node under the root is misfiled")
        while stack:
            node = stack.pop()
            parent = node.parent
            _require(parent is not None and parent.children.get(node.key) is node, "parent and child disagree")
            if parent is None:
                continue
            first = node.data[: self._page_bytes]
            top = (node.epoch, node.key[1], first)
            _require(node.key == (top if parent is self.root else first), "the key is not the run's")
            _require(parent is self.root or node.epoch == parent.epoch, "a run follows one of another epoch")
            _require(node.epoch == self.epoch or node.locks > 0, "an unlocked node of an old epoch is in the tree")
            _require(len(node.pages) > 0, "a node holds no pages")
            _require(len(node.data) == len(node.pages) * self._page_bytes, "a run's ids and pages differ in length")
            _require(node.depth == parent.depth + len(node.pages), "a node's depth is wrong")
            _require(node.locks >= 0, "a negative lock count")
            _require(parent is self.root or parent.locks >= node.locks, "a parent has fewer locks than its child")
            _require(
                (node.locks == 0) == (node in order),
                "a node is unlocked and not in the eviction order, or locked and in it",
            )
            if node.locks == 0:
                unlocked += 1
                evictable += len(node.pages)
                _require(parent not in order or order[node] < order[parent], "a node would be evicted after its parent")
            for page in node.pages:
                _require(page not in held, f"page {page} is held twice")
                _require(page > 0 and self._allocator.held(page), f"page {page} is held but free")
                held.add(page)
            stack.extend(node.children.values())
        _require(unlocked == len(order), "the eviction order names nodes that are not in the tree")
        _require(self.cached_pages == len(held), f"cached_pages is {self.cached_pages}, the tree holds {len(held)}")
        _require(self.evictable_pages == evictable, f"evictable_pages is {self.evictable_pages}, counted {evictable}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(f"radix tree: {message}")

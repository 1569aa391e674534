"""The tiers below the device's pool: which pages are to be copied down next, and which a prompt can have back."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Namespace, Node, RadixTree
from aengine.cache.tiers.disk import DiskPages
from aengine.cache.tiers.host import HostPage, HostPages
from aengine.cache.tiers.keys import page_keys, root_key
from aengine.cache.tiers.speeds import Speeds

_MOST_NODES = 1024  # of the tree that a look for pages to be copied passes
_MOST_FAILURES = 3  # copies down that fail in a row before no more is copied


@dataclass(slots=True, eq=False)
class Store:
    """A copy of pages of the tree into taken slots of host memory."""

    epoch: int  # of the tree when it began
    pages: list[int]
    keys: list[bytes]
    slots: list[int]
    durable: list[bool]  # whether a later start may read the page
    gone: set[int] = field(default_factory=set)  # pages that have left the tree meanwhile: what was copied is nothing


@dataclass(slots=True, eq=False)
class Found:
    """Consecutive pages that lie below, behind what the tree has."""

    keys: list[bytes]
    from_disk: int  # how many of them are to be read first


@dataclass(slots=True, eq=False)
class Load:
    """A copy of pages from slots of host memory to pages of the device that nobody else has."""

    epoch: int
    salt: Namespace
    node: Node  # locked: where the pages will follow
    token_ids: array[int]
    keys: list[bytes]
    pages: list[int]
    held: list[HostPage | int]  # the page in host memory, or the slot that it has to be read into

    @property
    def slots(self) -> list[int]:
        """Where each page lies in host memory, or will."""
        return [one if isinstance(one, int) else one.slot for one in self.held]

    @property
    def reads(self) -> list[tuple[int, bytes, int]]:
        """What has to be read from the disk: place in the load, key, slot."""
        return [(place, self.keys[place], one) for place, one in enumerate(self.held) if isinstance(one, int)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a load has ended. A load that was stopped, or that the device did not take, says nothing about its pages."""

    pages: int  # the first ones, which are on the device now
    next_is_unusable: bool = False  # the page after them cannot be read from the disk, now or later


@dataclass(slots=True, eq=False)
class Write:
    """A page of host memory, pinned, that is to be written to the disk."""

    epoch: int
    page: HostPage


@dataclass(slots=True)
class TierCounters:
    """Totals since start."""

    stored_pages: int = 0  # device to host
    loaded_pages: int = 0  # host to device
    written_pages: int = 0  # host to disk
    read_pages: int = 0  # disk to host
    lost_pages: int = 0  # evicted from the device before they were copied


class Tiers:
    """Host memory and, where there is a folder, a disk below a radix tree; bookkeeping alone, on the event loop.

    Whoever copies asks for `next_store`, `next_load` and `next_write`, and says with `end_store`, `end_load` and
    `end_write` how each has ended.
    """

    def __init__(
        self,
        tree: RadixTree,
        allocator: PageAllocator,
        host: HostPages,
        *,
        page_bytes: int,
        copy_pages: int,
        fingerprint: bytes,
        disk: DiskPages | None = None,
        speeds: Speeds | None = None,
    ) -> None:
        """page_bytes: of a page on all ranks; copy_pages: that one copy down has at most; fingerprint: as `root_key`'s.

        An empty tree and allocator, which nobody has used yet.
        """
        self.host = host
        self.disk = disk
        self.speeds = speeds or Speeds()
        self.counters = TierCounters()
        self.page_bytes = page_bytes
        self.fingerprint = fingerprint
        self.on_cleared: Callable[[], None] = lambda: None  # files have to go
        self._tree = tree
        self._allocator = allocator
        self._token_bytes = tree.page_size * array("I").itemsize
        pool = allocator.num_pages - 1
        # What is copied ahead lies in both places: of host memory it may have half.
        self._ahead = max(1, min(pool // 2 if disk is None else pool, host.slots // 2))
        self._copy_pages = max(1, min(copy_pages, host.slots // 4))
        self._keys: dict[int, bytes] = {}  # by page of the tree
        self._passing: set[int] = set()  # pages whose keys mean nothing to a later start
        self._seen = -1  # the tree's changes when nothing was to be copied
        self._store: Store | None = None
        self._failures = 0
        self._coming: dict[bytes, Load] = {}  # by the first key, oldest first
        self._loads: deque[Load] = deque()  # of these, those that have not begun
        self._writes: deque[Write] = deque()
        self._unwritten = 0  # writes that have not ended
        self._doomed: list[bytes] = []  # of files
        tree.watchers.append(self)

    # ---- what the tree says ---------------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """Note the keys of pages that the tree took."""
        previous = root_key(self.fingerprint, salt) if before is None else self._keys[before]
        self._keys.update(zip(pages, page_keys(previous, token_ids, self._token_bytes), strict=True))
        if isinstance(salt, tuple) and salt[0]:  # an adapter's number, which is another one's after a restart
            self._passing.update(pages)

    def removed(self, pages: Sequence[int]) -> None:
        """Forget pages that have left the tree; their copies count as used, the deepest one first."""
        for page in reversed(pages):
            key = self._keys.pop(page)
            self._passing.discard(page)
            if key in self.host:
                self.host.touch(key)
            else:
                self.counters.lost_pages += 1
        if self._store is not None:
            self._store.gone.update(pages)

    def cleared(self) -> None:
        """Drop everything; copies on their way will find that the tree has another epoch."""
        self.host.clear()
        if self.disk is not None:
            self._doomed += self.disk.clear()
        for write in self._writes:
            self.host.unpin(write.page)
        self._unwritten -= len(self._writes)
        self._writes.clear()
        self.on_cleared()

    # ---- down -----------------------------------------------------------------------------------------------

    @property
    def store_due(self) -> bool:
        """Whether a copy to host memory may be due, as far as that can be told without looking."""
        return self._store is None and self._seen != self._tree.changes and self._failures < _MOST_FAILURES

    def next_store(self) -> Store | None:
        """Begin the next copy to host memory, one at a time: of pages that the tree would evict next.

        Costs nothing while the tree has not changed since nothing was found.
        """
        if not self.store_due:
            return None
        pages = self._next_pages()
        slots = self.host.take(len(pages))
        if not slots:
            self._seen = self._tree.changes
            return None
        del pages[len(slots) :]
        keys = [self._keys[page] for page in pages]
        durable = [page not in self._passing for page in pages]
        self._store = Store(self._tree.epoch, pages, keys, slots, durable)
        return self._store

    def end_store(self, store: Store, arrived: bool) -> None:
        """A copy has ended: what is still in the tree lies in host memory now."""
        self._store = None
        self._failures = 0 if arrived else self._failures + 1
        for page, key, slot, durable in zip(store.pages, store.keys, store.slots, store.durable, strict=True):
            if not arrived or page in store.gone or store.epoch != self._tree.epoch:
                self.host.give_back(slot)
                continue
            self.host.put(key, slot)
            self.counters.stored_pages += 1
            if durable:
                self._write(key)

    def _next_pages(self) -> list[int]:
        """Pages without a copy among the next to be evicted, the first one first."""
        wanted = self._ahead - (self._allocator.free if self.disk is None else 0)
        pages: list[int] = []
        for looked, node in enumerate(self._tree.next_evicted()):
            if wanted <= 0 or looked >= _MOST_NODES or len(pages) >= self._copy_pages:
                break
            next_ones = node.pages[-wanted:]
            wanted -= len(next_ones)
            if node.backed:
                continue
            missing = [page for page in reversed(next_ones) if self._keys[page] not in self.host]
            pages += missing[: self._copy_pages - len(pages)]
            node.backed = len(next_ones) == len(node.pages) and (len(pages) < self._copy_pages or not missing)
        return pages

    # ---- up -------------------------------------------------------------------------------------------------

    def find(self, node: Node, token_ids: array[int], salt: Namespace) -> Found | None:
        """Look for the tokens' whole pages behind `node`, as far as they lie below and bringing them is worth it."""
        before = self._keys[node.pages[-1]] if node.pages else root_key(self.fingerprint, salt)
        keys: list[bytes] = []
        on_disk: list[bool] = []
        data = token_ids[node.depth * self._tree.page_size :].tobytes()
        for key in page_keys(before, data, self._token_bytes):
            if key not in self.host and (self.disk is None or key not in self.disk):
                break
            keys.append(key)
            on_disk.append(key not in self.host)
        in_host = on_disk.index(True) if True in on_disk else len(keys)
        for count in dict.fromkeys((len(keys), in_host)):
            if count and self._worth(count, sum(on_disk[:count])):
                return Found(keys[:count], sum(on_disk[:count]))
        return None

    def _worth(self, pages: int, from_disk: int) -> bool:
        size = self.page_bytes
        ahead = sum(len(load.pages) for load in self._coming.values()) * size
        return self.speeds.worth(pages * self._tree.page_size, pages * size, from_disk * size, ahead)

    def coming(self, found: Found) -> Load | None:
        """The load, if there is one, that begins with the same page."""
        return self._coming.get(found.keys[0])

    @property
    def loading(self) -> list[Load]:
        """The loads that have not ended, oldest first."""
        return list(self._coming.values())

    def begin_load(
        self, found: Found, node: Node, token_ids: array[int], salt: Namespace, pages: Sequence[int]
    ) -> Load | None:
        """Begin to load what was found into `pages`, which are the caller's; `node` is locked.

        None where host memory has no room for what has to be read first. A load may be shorter than what was found.
        """
        kept = [self.host.get(key) for key in found.keys]
        for page in kept:
            if page is not None:
                self.host.pin(page)
        slots = iter(self.host.take(found.from_disk))
        held: list[HostPage | int] = []
        for page in kept:
            one = page if page is not None else next(slots, None)
            if one is None:
                break
            held.append(one)
        for page in kept[len(held) :]:
            if page is not None:
                self.host.unpin(page)
        for slot in slots:
            self.host.give_back(slot)
        if not held:
            return None
        begin = node.depth * self._tree.page_size
        ids = token_ids[begin : begin + len(held) * self._tree.page_size]
        load = Load(self._tree.epoch, salt, node, ids, found.keys[: len(held)], list(pages), held)
        self._coming[load.keys[0]] = load
        self._loads.append(load)
        return load

    def next_load(self) -> Load | None:
        """The next load, which begins now."""
        return self._loads.popleft() if self._loads else None

    def end_load(self, load: Load, arrival: Arrival) -> None:
        """A load has ended. The file of a page that cannot be used is forgotten, and has to go."""
        del self._coming[load.keys[0]]
        valid = load.epoch == self._tree.epoch
        # Deepest first, so that of a run the beginning is kept longest.
        for place, (key, one) in reversed(list(enumerate(zip(load.keys, load.held, strict=True)))):
            if not isinstance(one, int):
                self.host.unpin(one)
                if one.known:
                    self.host.touch(key)
            elif place < arrival.pages and valid:
                self.host.put(key, one)
                self.counters.read_pages += 1
            else:
                self.host.give_back(one)
            if self.disk is not None:
                self.disk.touch(key)
        if arrival.next_is_unusable and self.disk is not None:
            key = load.keys[arrival.pages]
            self.disk.drop(key)
            self._doomed.append(key)
        self.counters.loaded_pages += arrival.pages

    # ---- to the disk ----------------------------------------------------------------------------------------

    def _write(self, key: bytes) -> None:
        """Let a page of host memory be written, unless it is there or the disk is too slow."""
        page = self.host.get(key)
        if self.disk is None or page is None or key in self.disk or self._unwritten >= self.host.slots // 4:
            return
        self.host.pin(page)
        self._unwritten += 1
        self._writes.append(Write(self._tree.epoch, page))

    def next_write(self) -> Write | None:
        """The next page to be written, which begins now."""
        return self._writes.popleft() if self._writes else None

    def end_write(self, write: Write, size: int) -> None:
        """A page was written to a file of so many bytes; 0: it was not."""
        self._unwritten -= 1
        self.host.unpin(write.page)
        if self.disk is None or not size:
            return
        if write.epoch != self._tree.epoch:
            self._doomed.append(write.page.key)
            return
        self.counters.written_pages += 1
        self._doomed += self.disk.add(write.page.key, size)

    def doomed_files(self) -> list[bytes]:
        """The keys of files that have to go; each is named once."""
        doomed, self._doomed = self._doomed, []
        return doomed

    # ---- figures and checks ---------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the fields of `Stats` about the tiers."""
        counters = self.counters
        return {
            "host_pages_total": self.host.slots,
            "host_pages": len(self.host),
            "host_page_bytes": self.page_bytes,
            "host_stores": counters.stored_pages,
            "host_loads": counters.loaded_pages,
            "host_misses": counters.lost_pages,
            "disk_bytes": 0 if self.disk is None else self.disk.bytes,
            "disk_stores": counters.written_pages,
            "disk_loads": counters.read_pages,
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless slots, pins and keys add up."""
        self.host.check_integrity()
        reads = sum(not isinstance(one, int) for load in self._coming.values() for one in load.held)
        if self.host.pins != reads + self._unwritten:
            raise AssertionError(f"tiers: {self.host.pins} pins of {reads} reads and {self._unwritten} writes")
        if len(self._keys) != self._tree.cached_pages:
            raise AssertionError(f"tiers: {len(self._keys)} keys of {self._tree.cached_pages} pages in the tree")

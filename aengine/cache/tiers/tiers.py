"""Decides which pages are copied to lower tiers next, and which are loaded for a prompt."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aengine.cache.image_keys import ids_before_images
from aengine.cache.pages import PageAllocator
from aengine.cache.radix import Namespace, Node, RadixTree
from aengine.cache.tiers.disk import DiskPages
from aengine.cache.tiers.host import HostPage, HostPages
from aengine.cache.tiers.keys import page_keys, root_key
from aengine.cache.tiers.speeds import Speeds

_MOST_NODES = 1024  # nodes of the tree that one search for pages to copy may visit
_MOST_FAILURES = 3  # after so many failed copies in a row, no page is copied to host memory any more


@dataclass(slots=True, eq=False)
class Store:
    """A copy of pages from the device into slots of host memory."""

    epoch: int  # the tree's epoch when the copy began
    pages: list[int]
    keys: list[bytes]
    slots: list[int]
    durable: list[bool]  # whether the page may be read after a restart
    gone: set[int] = field(default_factory=set)  # pages that left the tree during the copy; their copies are dropped


@dataclass(slots=True, eq=False)
class Found:
    """Consecutive pages in lower tiers that follow a cached prefix."""

    keys: list[bytes]
    from_disk: int  # number of pages that have to be read from the disk first


@dataclass(slots=True, eq=False)
class Load:
    """A copy of pages from slots of host memory to fresh pages of the device."""

    epoch: int  # the tree's epoch when the load was enqueued
    salt: Namespace
    node: Node  # locked; the pages will be inserted after it
    token_ids: array[int]
    keys: list[bytes]
    pages: list[int]
    held: list[HostPage | int]  # for each page: the page in host memory, or the slot to read it into from the disk

    @property
    def slots(self) -> list[int]:
        """The slot of each page in host memory."""
        return [one if isinstance(one, int) else one.slot for one in self.held]

    @property
    def reads(self) -> list[tuple[int, bytes, int]]:
        """The pages to read from the disk: index in the load, key, slot."""
        return [(i, self.keys[i], one) for i, one in enumerate(self.held) if isinstance(one, int)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The result of a load."""

    pages: int  # how many of the load's first pages are on the device now
    next_is_unusable: bool = False  # the file of the next page can never be used


@dataclass(slots=True, eq=False)
class Write:
    """A pinned page of host memory that has to be written to the disk."""

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
    """The bookkeeping of pages in host memory, and on a disk if there is a folder. Only the event loop may use it.

    The tasks that copy call `next_store`, `next_load` and `next_write` to begin, and `end_store`, `end_load` and
    `end_write` when each has ended.
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
    ) -> None:
        """The tree and the allocator must be unused.

        Args:
            page_bytes: size of a page over all ranks.
            copy_pages: the most pages of one copy to host memory.
            fingerprint: as for `root_key`.
        """
        self.host = host
        self.disk = disk
        self.speeds = Speeds()
        self.counters = TierCounters()
        self.page_bytes = page_bytes
        self.fingerprint = fingerprint
        self.on_cleared: Callable[[], None] = lambda: None  # called after `cleared`; there may be files to delete
        self._tree = tree
        self._allocator = allocator
        self._token_bytes = tree.page_size * array("I").itemsize
        pool = allocator.num_pages - 1
        # Pages that are copied before their eviction occupy both tiers. They may take half of host memory.
        self._most_copied_early = max(1, min(pool // 2 if disk is None else pool, host.slots // 2))
        self._copy_pages = max(1, min(copy_pages, host.slots // 4))
        self._keys: dict[int, bytes] = {}  # page of the tree -> key
        self._not_durable: set[int] = set()  # pages whose keys are not valid after a restart
        self._searched = -1  # `tree.changes` when the last search found nothing to copy
        self._store: Store | None = None
        self._failures = 0
        self._loading: dict[bytes, Load] = {}  # first key -> load that has not ended, oldest first
        self._loads: deque[Load] = deque()  # the loads that have not begun
        self._writes: deque[Write] = deque()
        self._unwritten = 0  # writes that have not ended
        self._to_delete: list[bytes] = []  # keys of files
        tree.watchers.append(self)

    # ---- events of the tree ---------------------------------------------------------------------------------

    def stored(self, before: int | None, token_ids: bytes, pages: Sequence[int], salt: Namespace) -> None:
        """Note the keys of a new run."""
        previous = root_key(self.fingerprint, salt) if before is None else self._keys[before]
        self._keys.update(zip(pages, page_keys(previous, token_ids, self._token_bytes), strict=True))
        # After a restart, another adapter or another image may have the same number.
        if (isinstance(salt, tuple) and salt[0]) or before in self._not_durable:
            self._not_durable.update(pages)
        else:
            self._not_durable.update(pages[ids_before_images(token_ids) // self._tree.page_size :])

    def removed(self, pages: Sequence[int]) -> None:
        """Forget pages that have left the tree. Their copies count as used, the deepest one first."""
        for page in reversed(pages):
            key = self._keys.pop(page)
            self._not_durable.discard(page)
            if key in self.host:
                self.host.touch(key)
            else:
                self.counters.lost_pages += 1
        if self._store is not None:
            self._store.gone.update(pages)

    def cleared(self) -> None:
        """Drop all pages. Copies that still run are dropped when they end, because the tree's epoch has changed."""
        self.host.clear()
        if self.disk is not None:
            self._to_delete += self.disk.clear()
        for write in self._writes:
            self.host.unpin(write.page)
        self._unwritten -= len(self._writes)
        self._writes.clear()
        self.on_cleared()

    # ---- down -----------------------------------------------------------------------------------------------

    @property
    def store_due(self) -> bool:
        """Whether a copy to host memory may be due. Cheap, because it does not search."""
        return self._store is None and self._searched != self._tree.changes and self._failures < _MOST_FAILURES

    def next_store(self) -> Store | None:
        """Begin a copy to host memory of the pages that the tree would evict next. One copy runs at a time.

        Returns None if there is nothing to copy. If the tree has not changed since the last search, it does not search.
        """
        if not self.store_due:
            return None
        pages = self._next_pages()
        slots = self.host.take(len(pages))
        if not slots:
            self._searched = self._tree.changes
            return None
        del pages[len(slots) :]
        keys = [self._keys[page] for page in pages]
        durable = [page not in self._not_durable for page in pages]
        self._store = Store(self._tree.epoch, pages, keys, slots, durable)
        return self._store

    def end_store(self, store: Store, arrived: bool) -> None:
        """Note the end of a copy. Copies of pages still in the tree are kept. arrived: whether it succeeded."""
        self._store = None
        self._failures = 0 if arrived else self._failures + 1
        for page, key, slot, durable in zip(store.pages, store.keys, store.slots, store.durable, strict=True):
            if not arrived or page in store.gone or store.epoch != self._tree.epoch:
                self.host.release(slot)
                continue
            self.host.put(key, slot)
            self.counters.stored_pages += 1
            if durable:
                self._enqueue_write(key)

    def _next_pages(self) -> list[int]:
        """Return pages that will be evicted next and have no copy in host memory, in eviction order."""
        wanted = self._most_copied_early - (self._allocator.free if self.disk is None else 0)
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
        """Find the pages of the tokens after `node` in lower tiers. Returns None if computing them is faster."""
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
        ahead = sum(len(load.pages) for load in self._loading.values()) * size
        return self.speeds.worth(pages * self._tree.page_size, pages * size, from_disk * size, ahead)

    def running_load(self, found: Found) -> Load | None:
        """Return the unfinished load that begins with the same page, if there is one."""
        return self._loading.get(found.keys[0])

    @property
    def loading(self) -> list[Load]:
        """The loads that have not ended, oldest first."""
        return list(self._loading.values())

    def begin_load(
        self, found: Found, node: Node, token_ids: array[int], salt: Namespace, pages: Sequence[int]
    ) -> Load | None:
        """Enqueue a load of the found pages into `pages`, which the caller owns. `node` must be locked.

        A load may have fewer pages than were found. Returns None if host memory has no slot for pages from the disk.
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
            self.host.release(slot)
        if not held:
            return None
        begin = node.depth * self._tree.page_size
        ids = token_ids[begin : begin + len(held) * self._tree.page_size]
        load = Load(self._tree.epoch, salt, node, ids, found.keys[: len(held)], list(pages), held)
        self._loading[load.keys[0]] = load
        self._loads.append(load)
        return load

    def next_load(self) -> Load | None:
        """Begin and return the next load."""
        return self._loads.popleft() if self._loads else None

    def end_load(self, load: Load, arrival: Arrival) -> None:
        """Note the end of a load. A file that cannot be used is forgotten, and will be deleted."""
        del self._loading[load.keys[0]]
        valid = load.epoch == self._tree.epoch
        # Deepest first, so that the beginning of a run is kept longest.
        for i, (key, one) in reversed(list(enumerate(zip(load.keys, load.held, strict=True)))):
            if not isinstance(one, int):
                self.host.unpin(one)
                if one.known:
                    self.host.touch(key)
            elif i < arrival.pages and valid:
                self.host.put(key, one)
                self.counters.read_pages += 1
            else:
                self.host.release(one)
            if self.disk is not None:
                self.disk.touch(key)
        if arrival.next_is_unusable and self.disk is not None:
            key = load.keys[arrival.pages]
            self.disk.drop(key)
            self._to_delete.append(key)
        self.counters.loaded_pages += arrival.pages

    # ---- to the disk ----------------------------------------------------------------------------------------

    def _enqueue_write(self, key: bytes) -> None:
        """Enqueue a page of host memory for writing, unless it is on the disk or too many writes are waiting."""
        page = self.host.get(key)
        if self.disk is None or page is None or key in self.disk or self._unwritten >= self.host.slots // 4:
            return
        self.host.pin(page)
        self._unwritten += 1
        self._writes.append(Write(self._tree.epoch, page))

    def next_write(self) -> Write | None:
        """Begin and return the next write."""
        return self._writes.popleft() if self._writes else None

    def end_write(self, write: Write, size: int) -> None:
        """Note the end of a write. size: of the file; 0 if it was not written."""
        self._unwritten -= 1
        self.host.unpin(write.page)
        if self.disk is None or not size:
            return
        if write.epoch != self._tree.epoch:
            self._to_delete.append(write.page.key)
            return
        self.counters.written_pages += 1
        self._to_delete += self.disk.add(write.page.key, size)

    def pop_files_to_delete(self) -> list[bytes]:
        """Return the keys of files that have to be deleted, and forget them."""
        keys, self._to_delete = self._to_delete, []
        return keys

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
        reads = sum(not isinstance(one, int) for load in self._loading.values() for one in load.held)
        if self.host.pins != reads + self._unwritten:
            raise AssertionError(f"tiers: {self.host.pins} pins of {reads} reads and {self._unwritten} writes")
        if len(self._keys) != self._tree.cached_pages:
            raise AssertionError(f"tiers: {len(self._keys)} keys of {self._tree.cached_pages} pages in the tree")

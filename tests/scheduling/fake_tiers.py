"""Host memory and a disk for the fake device. Copies take some turns, read and write as late as possible, and may fail.

A page is copied as it is when the copy ends. So a copy down that ends after its page was reused copies wrong content,
and the device notices when it is read back.
"""

from __future__ import annotations

from collections import OrderedDict

from aengine.cache.tiers.disk import DiskPages
from aengine.cache.tiers.host import HostPages
from aengine.cache.tiers.speeds import Speeds
from aengine.cache.tiers.tiers import Arrival, Load, Store, Tiers, Write
from aengine.scheduling.addons.loading import Loading
from aengine.scheduling.scheduler import Scheduler
from tests.scheduling.fake_device import POISON, FakeDevice, check

Content = tuple[list[int], list[int]]  # the device's cells of a page, and their eras
PAGE_BYTES = 100


class AlwaysWorth(Speeds):
    """Always prefers copying to computing."""

    def worth(self, tokens: int, nbytes: int, from_disk: int, ahead: int) -> bool:
        return True


class FakeDisk(DiskPages):
    """Only the index; `contents` replaces the files."""

    def __init__(self, most_pages: int) -> None:
        self.most_bytes = most_pages * PAGE_BYTES
        self.bytes = 0
        self._sizes = OrderedDict()
        self.contents: dict[bytes, Content] = {}


class FakeTiers:
    """Runs the copies of a scheduler over a fake device. Each takes `turns`; with 0, the test ends it."""

    def __init__(
        self, scheduler: Scheduler, device: FakeDevice, slots: int, disk_pages: int, copy_pages: int, turns: int
    ) -> None:
        self._device = device
        self._turns = turns
        self.host: dict[int, Content] = {}  # slot -> content
        self.disk = FakeDisk(disk_pages) if disk_pages else None
        self.tiers = Tiers(
            scheduler.memory.tree,
            scheduler.memory.allocator,
            HostPages(slots),
            page_bytes=PAGE_BYTES,
            copy_pages=copy_pages,
            fingerprint=b"fake",
            disk=self.disk,
        )
        self.tiers.speeds = AlwaysWorth()
        self.loading: Loading = scheduler.attach(self.tiers)
        self.copies: list[tuple[Store | Load | Write, int]] = []  # running copies, and the turns that each still takes

    def step(self) -> None:
        """Advance all copies by one turn."""
        self.copies = [(copy, turns - 1) for copy, turns in self.copies]
        for which in reversed([which for which, (_, turns) in enumerate(self.copies) if turns <= 0]):
            self.end(which)
        self.begin()

    def begin(self) -> None:
        """Begin the copies that are due. Deleting files takes no turn."""
        self._tidy()
        for begun in (self.tiers.next_store(), self.tiers.next_load(), self.tiers.next_write()):
            if begun is not None:
                self.copies.append((begun, self._turns))

    def end(self, which: int = 0, fails: bool = False) -> None:
        """End a copy."""
        copy, _ = self.copies.pop(which)
        match copy:
            case Store():
                self._end_store(copy, fails)
            case Load():
                self._end_load(copy, fails)
            case Write():
                self._end_write(copy, fails)
        self._tidy()

    def end_all(self) -> None:
        """Run until nothing is left to copy."""
        while self.copies or self.tiers.store_due:
            if self.copies:
                self.end()
            self.begin()

    def _end_store(self, store: Store, fails: bool) -> None:
        check(len(store.pages) == len(set(store.pages)) == len(set(store.slots)), "a copy names something twice")
        for page, slot in zip(store.pages, store.slots, strict=True):
            self.host[slot] = ([], []) if fails else self._read(page)
        self.tiers.end_store(store, not fails)

    def _end_load(self, load: Load, fails: bool) -> None:
        arrived, unusable = len(load.pages), False
        for place, key, slot in load.reads:
            content = None if self.disk is None else self.disk.contents.get(key)
            if content is None or (fails and place == arrived - 1):
                arrived, unusable = place, True
                break
            self.host[slot] = content
        if fails and not unusable:  # the copy to the device fails
            arrived //= 2
        for page, slot in zip(load.pages[:arrived], load.slots[:arrived], strict=True):
            self._write(page, self.host[slot])
        known = [key for key in load.keys if self._lies_below(key)]
        self.loading.end(load, Arrival(arrived, unusable))
        lost = [key for key in known if not self._lies_below(key)]
        check(lost in ([], load.keys[arrived : arrived + unusable]), "a load that was stopped has lost a sound page")

    def _lies_below(self, key: bytes) -> bool:
        return key in self.tiers.host or (self.disk is not None and key in self.disk)

    def _end_write(self, write: Write, fails: bool) -> None:
        if self.disk is not None and not fails:
            self.disk.contents[write.page.key] = self.host[write.page.slot]
        self.tiers.end_write(write, 0 if fails else PAGE_BYTES)

    def _tidy(self) -> None:
        for key in self.tiers.pop_files_to_delete():
            if self.disk is not None and key not in self.disk:
                self.disk.contents.pop(key, None)

    def _read(self, page: int) -> Content:
        size = self._device.page_size
        cells = slice(page * size, (page + 1) * size)
        return self._device.slots[cells], self._device.eras[cells]

    def _write(self, page: int, content: Content) -> None:
        size = self._device.page_size
        cells = slice(page * size, (page + 1) * size)
        check(self._device.allocator.held(page), f"page {page} is written by a copy, but free")
        check(self._device.slots[cells] == [POISON] * size, f"page {page} is written by a copy, and somebody's")
        for launch in self._device.queue:
            check(page not in launch.pages, f"page {page} is written while step {launch.plan.step} names it")
        self._device.slots[cells], self._device.eras[cells] = content

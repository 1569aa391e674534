"""The tasks that copy KV pages between the device, host memory and a disk while steps run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from aengine.cache.tiers.disk import DiskPages, FailureLog, PageFileError
from aengine.cache.tiers.host import HostPages
from aengine.cache.tiers.tiers import Arrival, Load, Store, Tiers, Write
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.scheduling.addons.loading import Loading
from aengine.scheduling.memory import SequenceMemory
from aengine.step_plan import StepPlan

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.runtime.page_copies import PageCopies

log = logging.getLogger("aengine")

COPY_BYTES = 128 * 2**20  # of one copy to the host; the copy of a page that is evicted meanwhile is wasted
WRITING_SECONDS = 10.0  # how long a closing engine still writes pages to the disk


class TierTasks:
    """Three tasks that copy pages: down to host memory, up to the device, and to files. Each does one copy at a time.

    `poll`, called between steps, wakes the first two tasks if there may be something to copy.
    """

    def __init__(self, loading: Loading, copies: PageCopies) -> None:
        self.tiers: Tiers = loading.tiers
        self._loading = loading
        self._copies = copies
        self._disk: DiskPages | None = loading.tiers.disk
        self._files = ThreadPoolExecutor(1, "aengine-page-files-out")
        self._readers = ThreadPoolExecutor(4, "aengine-page-files-in")
        self._changed = {lane: asyncio.Event() for lane in ("down", "up", "files")}
        self._unwritten = FailureLog("disk_cache_dir: pages can be written again")
        self._wake: Callable[[], None] = lambda: None
        self._closing = False
        self._paused = False
        self._moving = 0  # copies that are running on the device
        self._idle = asyncio.Event()  # none is running
        self._idle.set()
        self._ended = asyncio.Event()  # `run` has ended, or was never called
        self._ended.set()
        self.tiers.on_cleared = self._changed["files"].set

    def poll(self) -> None:
        """Wake the tasks if there may be something to copy."""
        if self.tiers.store_due:
            self._changed["down"].set()
        if self._loading.busy:
            self._changed["up"].set()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Update the measured speed of prefill with a step and its duration in seconds."""
        self.tiers.speeds.add_compute(sum(len(chunk.token_ids) for chunk in plan.prefill), seconds)

    async def run(self, wake: Callable[[], None]) -> None:
        """Run all three tasks until `close`. wake: wakes the step loop."""
        self._wake = wake
        self._ended.clear()
        with anyio.CancelScope(shield=True):  # `close` waits until this task has ended, and then frees the memory
            async with anyio.create_task_group() as lanes:
                lanes.start_soon(self._down)
                lanes.start_soon(self._up)
                lanes.start_soon(self._write_files)
            self._ended.set()

    async def pause(self) -> None:
        """Copy nothing from or to the device until `resume`, and wait for copies that are running."""
        self._paused = True
        await self._idle.wait()

    def resume(self) -> None:
        """Allow copies again after `pause`."""
        self._paused = False
        for changed in self._changed.values():
            changed.set()

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._moving += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._moving -= 1
            if not self._moving:
                self._idle.set()

    async def close(self) -> None:
        """Stop copying, and free the host memory. Waiting pages are written to the disk for up to WRITING_SECONDS."""
        self._closing = True
        for changed in self._changed.values():
            changed.set()
        await self._ended.wait()
        self._readers.shutdown()
        self._files.shutdown()
        await anyio.to_thread.run_sync(self._copies.close)

    async def _news(self, lane: str) -> None:
        await self._changed[lane].wait()
        self._changed[lane].clear()

    # ---- down -----------------------------------------------------------------------------------------------

    async def _down(self) -> None:
        while not self._closing:
            store = None if self._paused else self.tiers.next_store()
            if store is None:
                await self._news("down")
            else:
                with self._copying():
                    self.tiers.end_store(store, await self._stored(store))
                self._changed["files"].set()

    async def _stored(self, store: Store) -> bool:
        try:
            await self._copies.to_host(store.pages, store.slots)
        except Exception as error:  # noqa: BLE001 - only cache is lost; steps report a lost device
            log.error("%d KV pages could not be copied to host memory: %s", len(store.pages), error)
            return False
        return True

    # ---- up -------------------------------------------------------------------------------------------------

    async def _up(self) -> None:
        while not self._closing:
            load = None if self._paused else self.tiers.next_load()
            if load is None:
                await self._news("up")
            else:
                with self._copying():
                    self._loading.end(load, await self._loaded(load))
                self._changed["files"].set()
                self._wake()
        while (load := self.tiers.next_load()) is not None:
            self._loading.end(load, Arrival(0))

    async def _loaded(self, load: Load) -> Arrival:
        """Copy a load's pages to the device. Return how many pages arrived."""
        arrival = await self._read(load)
        arrived = arrival.pages
        began = time.perf_counter()
        try:
            if arrived:
                await self._copies.to_device(load.slots[:arrived], load.pages[:arrived])
        except Exception as error:  # noqa: BLE001 - pages are computed instead; steps report a lost device
            log.error("%d KV pages could not be copied from host memory: %s", arrived, error)
            return Arrival(0)
        self.tiers.speeds.add_load(arrived * self.tiers.page_bytes, time.perf_counter() - began)
        return arrival

    async def _read(self, load: Load) -> Arrival:
        """Read the load's pages that are on the disk into host memory."""
        reads, disk = load.reads, self._disk
        if not reads or disk is None:
            return Arrival(len(load.keys))
        loop, began = asyncio.get_running_loop(), time.perf_counter()

        def read(key: bytes, slot: int) -> None:
            disk.read(key, self._copies.memory(slot))

        futures = [loop.run_in_executor(self._readers, read, key, slot) for _, key, slot in reads]
        results = await asyncio.gather(*futures, return_exceptions=True)
        self.tiers.speeds.add_read(len(reads) * self.tiers.page_bytes, time.perf_counter() - began)
        for (place, _, _), result in zip(reads, results, strict=True):
            if result is not None:
                unusable = isinstance(result, PageFileError)
                level = logging.WARNING if unusable else logging.ERROR
                log.log(level, "disk_cache_dir: %s; its page is computed again", result)
                return Arrival(place, unusable)
        return Arrival(len(load.keys))

    # ---- files ----------------------------------------------------------------------------------------------

    async def _write_files(self) -> None:
        disk, until = self._disk, None
        while disk is not None:
            if self._closing and until is None:
                until = time.monotonic() + WRITING_SECONDS
            if doomed := self.tiers.pop_files_to_delete():
                await asyncio.get_running_loop().run_in_executor(self._files, disk.delete, doomed)
            write = self.tiers.next_write()
            if write is not None and (until is None or time.monotonic() < until):
                self.tiers.end_write(write, await self._written(disk, write))
            elif write is not None:
                self.tiers.end_write(write, 0)
            elif self._closing:
                return
            else:
                await self._news("files")

    async def _written(self, disk: DiskPages, write: Write) -> int:
        page = write.page
        parts = self._copies.memory(page.slot)
        try:
            size = await asyncio.get_running_loop().run_in_executor(self._files, disk.write, page.key, parts)
        except OSError as error:
            self._unwritten.failed("disk_cache_dir: a page could not be written: %s", error)
            return 0
        self._unwritten.succeeded()
        return size


def open_disk(config: EngineConfig) -> DiskPages | None:
    """Open the folder of cached pages. Returns None if the config names none. Raises `ConfigError`."""
    if config.host_cache_gib and not config.prefix_cache:
        raise ConfigError("host_cache_gib: without the prefix cache no pages are kept; leave prefix_cache on")
    if config.disk_cache_dir is None:
        return None
    if not config.host_cache_gib:
        raise ConfigError("disk_cache_dir: pages reach the disk through host memory; set host_cache_gib as well")
    try:
        return DiskPages(Path(config.disk_cache_dir), int(config.disk_cache_gib * 2**30))
    except OSError as error:
        raise ConfigError(f"disk_cache_dir: {config.disk_cache_dir}: {error.strerror}") from None


def make_tiers(memory: SequenceMemory, copies: PageCopies, fingerprint: bytes, disk: DiskPages | None) -> Tiers:
    """Return the tiers below the KV pool. `copies` owns the host memory."""
    return Tiers(
        memory.tree,
        memory.allocator,
        HostPages(copies.slots),
        page_bytes=copies.page_bytes,
        copy_pages=max(1, COPY_BYTES // copies.page_bytes),
        fingerprint=fingerprint,
        disk=disk,
    )

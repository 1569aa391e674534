"""Manages adapters: a worker thread reads them, host memory keeps them, a task copies them to the device on demand."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from aengine.errors import EngineClosedError, EngineFailedError, InvalidRequestError, ModelNotFoundError
from aengine.model.loading.hub import resolve_adapter
from aengine.scheduling.addons.adapter_queue import AdapterLoad, AdapterQueue
from aengine.scheduling.sequence import LoadedAdapter, Sequence
from aengine.types import AdapterInfo

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.model.lora.memory import Adapter
    from aengine.runtime.adapters import AdapterPlaces

log = logging.getLogger("aengine")

MOST_ADAPTERS = 4096  # loaded at once
_WEIGHTS = "adapter_model.safetensors"
# Names have no commas and equals signs, because these separate names in knobs and in metrics.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")

Fail = Callable[[Sequence, EngineFailedError], None]  # ends the request of a sequence


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """An adapter that requests may name."""

    adapter: LoadedAdapter
    path: str
    created: int


class Adapters:
    """Loads and unloads adapters while steps run. No step waits for this.

    A worker thread reads adapters, one at a time. `run`, a task of the engine, copies adapters to the device when
    requests wait for them. `poll`, called between steps, wakes this task.
    """

    def __init__(self, places: AdapterPlaces, host_bytes: int, reserved: Collection[str]) -> None:
        """host_bytes: the most bytes that all adapters may take. reserved: names that no adapter may have."""
        self.queue = AdapterQueue(places.count)
        self._places = places
        self._host_bytes = host_bytes
        self._reserved = reserved
        self._named: dict[str, _Entry] = {}
        # Unloaded adapters that are still in use. The event is set when the last use has ended.
        self._leaving: dict[LoadedAdapter, asyncio.Event] = {}
        self._weights: dict[LoadedAdapter, Adapter] = {}  # of adapters in `_named` and `_leaving`
        self._generations = itertools.count(1)
        self._reading = asyncio.Lock()
        self._news = asyncio.Event()
        self._closing = False
        self._paused = False
        self._idle = asyncio.Event()  # no copy to the device is running
        self._idle.set()
        self._ended = asyncio.Event()  # `run` has ended, or was never called
        self._ended.set()
        self._wake: Callable[[], None] = lambda: None

    # ---- by name --------------------------------------------------------------------------------------------

    def named(self, name: str) -> LoadedAdapter:
        """Return the adapter with this name. Raises `ModelNotFoundError`."""
        return self._entry(name).adapter

    def has(self, name: str) -> bool:
        """Return whether requests may name the adapter."""
        return name in self._named

    def list(self) -> list[AdapterInfo]:
        """Return all adapters that requests may name, in the order in which they were loaded."""
        return [
            AdapterInfo(
                name=name,
                path=entry.path,
                rank=self._weights[entry.adapter].rank,
                bytes=self._weights[entry.adapter].bytes,
                created=entry.created,
                on_device=entry.adapter.ready,
                running=entry.adapter.rows,
                waiting=self.queue.waiting_for(entry.adapter),
            )
            for name, entry in self._named.items()
        ]

    async def load(self, name: str, path: str, replace: bool = False) -> None:
        """Read an adapter, and let requests name it. If this fails, nothing changes.

        Raises `InvalidRequestError` for a name that is not valid or taken, `AdapterError` and `HubError`.
        """
        self._check_name(name, replace)
        async with self._reading:
            self._check_name(name, replace)  # other adapters may have been loaded meanwhile
            weights = await anyio.to_thread.run_sync(self.read, path)
            if self._closing:
                raise EngineClosedError("the engine is closed")
            self.add(name, path, weights)

    def read(self, path: str) -> Adapter:
        """Read an adapter into host memory. Does blocking I/O; call it in a worker thread. Raises as `load` does."""
        folder = resolve_adapter(path)
        weights = folder / _WEIGHTS
        self._check_room(weights.stat().st_size if weights.is_file() else 0)  # before reading it
        adapter = self._places.read(folder)
        self._check_room(adapter.bytes)
        return adapter

    def add(self, name: str, path: str, weights: Adapter) -> None:
        """Let requests name an adapter that was read. Running requests keep an older adapter of the same name."""
        self._check_name(name, replace=True)
        if (old := self._named.pop(name, None)) is not None:
            self._leave(old.adapter)
        adapter = LoadedAdapter(next(self._generations), name)
        self._weights[adapter] = weights
        self._named[name] = _Entry(adapter, path, int(time.time()))
        self.queue.preload(adapter)
        self._news.set()

    async def unload(self, name: str) -> None:
        """Refuse new requests for an adapter, and wait until its requests are done and its memory is free.

        A cancelled call does not undo the unloading. Raises `ModelNotFoundError`, and `EngineClosedError` if the engine
        closes meanwhile.
        """
        adapter = self._entry(name).adapter
        del self._named[name]
        await self._leave(adapter).wait()
        if self._closing:
            raise EngineClosedError("the engine was closed")

    def _entry(self, name: str) -> _Entry:
        entry = self._named.get(name)
        if entry is None:
            raise ModelNotFoundError(f"the adapter {name[:200]!r} is not loaded")
        return entry

    def _leave(self, adapter: LoadedAdapter) -> asyncio.Event:
        gone = self._leaving[adapter] = asyncio.Event()
        self._wake()  # the loop calls `poll`, which may find that the adapter is not in use
        return gone

    def _check_name(self, name: object, replace: bool) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequestError(
                "name must be 1 to 200 letters, digits or any of . _ : / @ + -, and begin with a letter or digit",
                "name",
            )
        if name in self._reserved:
            raise InvalidRequestError(f"name {name!r} is the model's own", "name")
        if name in self._named and not replace:
            raise InvalidRequestError(
                f"name: the adapter {name!r} has already been loaded; unload it first, or load it in place", "name"
            )
        if name not in self._named and len(self._named) >= MOST_ADAPTERS:
            raise InvalidRequestError(
                f"name: {MOST_ADAPTERS} adapters are loaded, which is the most; unload one", "name"
            )

    def _check_room(self, size: int) -> None:
        taken = sum(weights.bytes for weights in list(self._weights.values()))
        if taken + size > self._host_bytes:
            raise InvalidRequestError(
                f"path: the adapter takes {size / 2**20:.0f} MiB of host memory, and those that are loaded have "
                f"{taken / 2**20:.0f} of {self._host_bytes / 2**20:.0f}; unload one, or raise lora_host_gib",
                "path",
            )

    # ---- to the device --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Wake `run` if a request waits for an adapter, and free unloaded adapters that are no longer in use."""
        if self.queue.awaited:
            self._news.set()
        if self._leaving:
            for adapter in [adapter for adapter in self._leaving if self.queue.forget(adapter)]:
                del self._weights[adapter]
                self._leaving.pop(adapter).set()
                self._news.set()  # a place became empty

    async def run(self, wake: Callable[[], None], fail: Fail) -> None:
        """Copy adapters to the device until `close`. The engine runs this as a task.

        wake: wakes the step loop. fail: ends the request of a sequence whose adapter cannot be copied.
        """
        self._wake = wake
        self._ended.clear()
        with anyio.CancelScope(shield=True):  # `close` waits until this task has ended, and then frees the memory
            while not self._closing:
                load = None if self._paused else self.queue.next_load()
                if load is None:
                    await self._news.wait()
                    self._news.clear()
                else:
                    self._idle.clear()
                    await self._put(load, fail)
                    self._idle.set()
                    wake()
            self._ended.set()

    async def _put(self, load: AdapterLoad, fail: Fail) -> None:
        try:
            await self._places.put(self._weights[load.adapter], load.place)
        except Exception as error:  # steps go on; if the device is lost, they fail too
            log.error("the adapter %s could not be copied to the device", load.adapter.name, exc_info=error)
            failure = EngineFailedError(f"the adapter could not be copied to the device: {type(error).__name__}")
            failure.__cause__ = error
            for sequence in self.queue.fail_load(load):
                fail(sequence, failure)
        else:
            self.queue.finish_load(load)

    async def pause(self) -> None:
        """Copy nothing to the device until `resume`, and wait for a copy that is running."""
        self._paused = True
        await self._idle.wait()

    def resume(self) -> None:
        """Allow copies again after `pause`."""
        self._paused = False
        self._news.set()

    async def close(self) -> None:
        """End `run` after its current copy. Waiting calls of `unload` raise `EngineClosedError`."""
        self._closing = True
        self._news.set()
        for gone in self._leaving.values():
            gone.set()
        await self._ended.wait()
        await anyio.to_thread.run_sync(self._places.close)

"""Changes of the device's memory: `sleep`, `wake_up` and `reload`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import anyio
import anyio.to_thread

from aengine.config import EngineConfig
from aengine.engine.loaded import Loaded, read_model_config
from aengine.engine.loop import StepLoop
from aengine.engine.requests.registry import Requests
from aengine.errors import ConfigError, EngineNotReadyError, InvalidRequestError, WeightsError
from aengine.model.loading.hub import resolve_model
from aengine.runtime.sleep import SleepableMemory
from aengine.types import SleepMode

if TYPE_CHECKING:  # torch
    from aengine.model.checkpoint.weights import Checkpoint
    from aengine.runtime.weights import Weights

_ASLEEP = "the engine is asleep; wake it up (POST /wake_up)"
_INCONSISTENT = "the last reload failed half way, and the weights are a mixture; reload them again (POST /reload)"


class DeviceChanges:
    """Runs `sleep`, `wake_up` and `reload` one at a time, in the order of the calls, while no step is running.

    A change waits until all running requests have ended. New requests are refused with `EngineNotReadyError` while the
    engine sleeps. New requests wait while weights are reloaded, and then run with the new weights.
    """

    def __init__(self, config: EngineConfig, loaded: Loaded, loop: StepLoop, requests: Requests) -> None:
        self.lock = asyncio.Lock()  # held during a change
        self.asleep = False
        self._config = config
        self._loaded = loaded
        self._loop = loop
        self._requests = requests

    async def sleep(self, level: int, mode: SleepMode) -> None:
        """Move the weights to host memory, drop keys and values, and free the device's memory."""
        if level != 1 or isinstance(level, bool):
            raise InvalidRequestError(
                f"level must be 1 (weights go to host memory), got {level!r}: weights are never discarded", "level"
            )
        if mode not in get_args(SleepMode):
            raise InvalidRequestError(f"mode must be wait or abort, got {mode!r}", "mode")
        memory = self._sleepable()
        async with self.lock:
            if self.asleep:
                return
            async with self._paused(partial(self._requests.gate.refuse, _ASLEEP), mode):
                self._loaded.flush_caches()
                await run_to_end(memory.sleep, self._fell_asleep)

    async def wake_up(self) -> None:
        """Copy the weights back to the device, and serve requests again."""
        memory = self._sleepable()
        async with self.lock:
            self._requests.check()
            if not self.asleep:
                return
            from torch import OutOfMemoryError  # torch was imported when the model was loaded

            try:
                await run_to_end(memory.wake, self._woke_up)
            except OutOfMemoryError as error:
                raise EngineNotReadyError(
                    "the engine sleeps on: others have taken the memory that it gave back; free it, and wake it again"
                ) from error

    async def reload(self, folder: str | Path | None) -> None:
        """Replace the loaded weights by those in a checkpoint's folder."""
        weights = self._loaded.runtime.weights
        if weights is None:
            raise ConfigError("start: the weights of this runtime cannot be reloaded")
        async with self.lock:
            self._requests.check()
            if self.asleep:
                raise EngineNotReadyError(_ASLEEP)
            path = await anyio.to_thread.run_sync(_existing, self._config, folder)
            checkpoint = await anyio.to_thread.run_sync(_matching, weights, self._config, path)
            async with self._paused(self._requests.gate.hold):
                self._loaded.flush_caches()
                await run_to_end(partial(weights.reload, checkpoint), partial(self._loaded.note_reload, path))

    def _sleepable(self) -> SleepableMemory:
        memory = self._loaded.runtime.memory
        if memory is None:
            raise ConfigError("sleep_mode: the engine cannot sleep; start it with sleep_mode=True (--sleep-mode)")
        return memory

    @asynccontextmanager
    async def _paused(self, close_gate: Callable[[], None], mode: SleepMode = "wait") -> AsyncIterator[None]:
        """Run the block while no request is running and the device is idle. Then resume, unless the engine sleeps."""
        self._requests.check()
        close_gate()
        try:
            if mode == "abort":
                self._requests.abort_all()
            await self._requests.wait_until_empty()
            await self._loop.pause()
            await self._loaded.pause()
            self._requests.check()  # the engine may have been closed meanwhile
            yield
        finally:
            if not self.asleep:
                self._resume()

    def _resume(self) -> None:
        self._loaded.resume()
        self._loop.resume()
        weights = self._loaded.runtime.weights
        if weights is None or weights.consistent:
            self._requests.gate.open()
        else:
            self._requests.gate.refuse(_INCONSISTENT)

    def _fell_asleep(self) -> None:
        self.asleep = True

    def _woke_up(self) -> None:
        self.asleep = False
        self._resume()


def _existing(config: EngineConfig, folder: str | Path | None) -> Path:
    """Return a checkpoint's folder. None means that of the config. Does blocking I/O; call it in a worker thread."""
    path = resolve_model(config.model, config.revision) if folder is None else Path(folder).expanduser()
    if not path.is_dir():
        raise InvalidRequestError(f"folder: there is no folder {str(path)[:200]!r}", "folder")
    return path


def _matching(weights: Weights, config: EngineConfig, path: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Does blocking I/O; call it in a worker thread."""
    try:
        model = read_model_config(config, path)
    except ConfigError as error:  # a checkpoint like this could not have been loaded
        raise WeightsError(f"{path}: the engine's knobs do not fit this checkpoint: {error}") from error
    return weights.matching(path, model)


async def run_to_end(work: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
    """Run `work` in a thread, then call `done`. A cancelled caller still waits until both have ended."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # an anyio scope would cancel again in every pass of the loop
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError as error:
                cancelled = error
    working.result()
    done()
    if cancelled is not None:
        raise cancelled

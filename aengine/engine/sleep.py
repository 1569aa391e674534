"""`Engine`'s methods that change what lies on its device: `sleep`, `wake_up` and `reload`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import anyio
import anyio.to_thread

from aengine.config import EngineConfig
from aengine.engine.loaded import Loaded, described_model
from aengine.engine.loop import StepLoop
from aengine.engine.requests.gate import Gate
from aengine.engine.requests.live import LiveRequest
from aengine.engine.requests.pooled import PooledRequest
from aengine.errors import ConfigError, EngineNotReadyError, InvalidRequestError, WeightsError
from aengine.model.loading.hub import resolve_model
from aengine.runtime.sleep import SleepableMemory
from aengine.types import SleepMode

if TYPE_CHECKING:  # torch
    from aengine.model.checkpoint.weights import Checkpoint
    from aengine.runtime.weights import Weights

_ASLEEP = "the engine is asleep; wake it up (POST /wake_up)"
_MIXTURE = "the last reload failed half way, and the weights are a mixture; reload them again (POST /reload)"


class Sleeping(ABC):
    """One change at a time, in the order in which they are asked for, while no step is on the device.

    Requests that came before a change end before it. Those that come while the engine sleeps are refused with
    `EngineNotReadyError`; those that come while weights are reloaded wait, and run with the new ones.
    """

    config: EngineConfig
    _requests: dict[str, LiveRequest | PooledRequest]
    _loop: StepLoop | None

    def __init__(self, most_held: int) -> None:
        self._gate = Gate(most_held)
        self._changing = asyncio.Lock()
        self._asleep = False
        self._emptied = asyncio.Event()  # the last request has ended

    @abstractmethod
    def _serving(self) -> Loaded: ...

    @abstractmethod
    def _abort(self, request: LiveRequest | PooledRequest) -> None: ...

    @property
    def is_sleeping(self) -> bool:
        """Whether the device's memory has been given back."""
        return self._asleep

    @property
    def refusal(self) -> str:
        """Why no request is taken up; empty: they are, or wait for weights that are being reloaded."""
        return self._gate.refusal

    @property
    def sleep_mode(self) -> bool:
        """Whether the engine can sleep."""
        return self.config.sleep_mode

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Move the weights to host memory, forget keys and values, and give the device's memory back.

        New requests are refused from now on; those that are here end first, or at once with `mode="abort"`. Adapters
        stay loaded. Given up while it waits for them, nothing has happened. An engine that sleeps sleeps on.

        level: 1, as vLLM has it; its 2, which discards the weights, is refused. Raises `InvalidRequestError`, and
        `ConfigError` without the knob sleep_mode.
        """
        if level != 1 or isinstance(level, bool):
            raise InvalidRequestError(
                f"level must be 1 (weights go to host memory), got {level!r}: weights are never discarded", "level"
            )
        if mode not in get_args(SleepMode):
            raise InvalidRequestError(f"mode must be wait or abort, got {mode!r}", "mode")
        memory = self._sleepable()
        async with self._changing:
            if self._asleep:
                return
            async with self._at_rest(partial(self._gate.refuse, _ASLEEP), mode) as ready:
                ready.scheduler.flush_cache()
                await to_the_end(memory.sleep, self._fell_asleep)

    async def wake_up(self) -> None:
        """Bring the weights back to the device; then requests are served again, from an empty prefix cache.

        Raises `EngineNotReadyError` where others have taken the device's memory meanwhile; then the engine sleeps on.
        """
        memory = self._sleepable()
        async with self._changing:
            ready = self._serving()
            if not self._asleep:
                return
            from torch import OutOfMemoryError  # which is there since the model was loaded

            try:
                await to_the_end(memory.wake, partial(self._woke_up, ready))
            except OutOfMemoryError as error:
                raise EngineNotReadyError(
                    "the engine sleeps on: others have taken the memory that it gave back; free it, and wake it again"
                ) from error

    async def reload(self, folder: str | Path | None = None) -> None:
        """Read the weights of a checkpoint's folder over those that are loaded. None: the engine's own once more.

        Requests that are here end with the old weights, those that come meanwhile wait for the new ones, and nothing
        that was cached with the old ones is used again. Adapters stay loaded, and so do the tokenizer, the chat
        template and the defaults of sampling.

        Raises `WeightsError` and its like for a checkpoint of another model, which changes nothing, and
        `EngineNotReadyError` where the engine sleeps. Where reading fails half way, requests are refused until a call
        succeeds.
        """
        weights = self._serving().runtime.weights
        if weights is None:
            raise ConfigError("start: the weights of this runtime cannot be reloaded")
        async with self._changing:
            self._serving()
            if self._asleep:
                raise EngineNotReadyError(_ASLEEP)
            path = await anyio.to_thread.run_sync(_existing, self.config, folder)
            checkpoint = await anyio.to_thread.run_sync(_matching, weights, self.config, path)
            async with self._at_rest(self._gate.hold) as ready:
                ready.scheduler.flush_cache()
                await to_the_end(partial(weights.reload, checkpoint), partial(ready.reloaded, path))

    def _sleepable(self) -> SleepableMemory:
        memory = self._serving().runtime.memory
        if memory is None:
            raise ConfigError("sleep_mode: the engine cannot sleep; start it with sleep_mode=True (--sleep-mode)")
        return memory

    @asynccontextmanager
    async def _at_rest(self, close_gate: Callable[[], None], mode: SleepMode = "wait") -> AsyncIterator[Loaded]:
        """No request is here and nothing is on the device. Then all goes on, unless the engine has fallen asleep."""
        ready, loop = self._serving(), self._loop
        if loop is None:
            raise EngineNotReadyError("the engine is still loading")
        close_gate()
        try:
            if mode == "abort":
                for request in list(self._requests.values()):
                    self._abort(request)
            while self._requests:
                self._emptied.clear()
                await self._emptied.wait()
            await loop.rest()
            if ready.adapters is not None:
                await ready.adapters.rest()
            if ready.carriers is not None:
                await ready.carriers.rest()
            yield self._serving()  # unless it was closed meanwhile
        finally:
            if not self._asleep:
                self._go_on(ready)

    def _go_on(self, ready: Loaded) -> None:
        if ready.adapters is not None:
            ready.adapters.go_on()
        if ready.carriers is not None:
            ready.carriers.go_on()
        if self._loop is not None:
            self._loop.go_on()
        weights = ready.runtime.weights
        if weights is None or weights.whole:
            self._gate.open()
        else:
            self._gate.refuse(_MIXTURE)

    def _fell_asleep(self) -> None:
        self._asleep = True

    def _woke_up(self, ready: Loaded) -> None:
        self._asleep = False
        self._go_on(ready)


def _existing(config: EngineConfig, folder: str | Path | None) -> Path:
    """A checkpoint's folder, None: the engine's own. Blocks."""
    path = resolve_model(config.model, config.revision) if folder is None else Path(folder).expanduser()
    if not path.is_dir():
        raise InvalidRequestError(f"folder: there is no folder {str(path)[:200]!r}", "folder")
    return path


def _matching(weights: Weights, config: EngineConfig, path: Path) -> Checkpoint:
    """The checkpoint in a folder. Blocks."""
    try:
        model = described_model(config, path)
    except ConfigError as error:  # that no checkpoint like this would have been loaded
        raise WeightsError(f"{path}: the engine's knobs do not fit this checkpoint: {error}") from error
    return weights.matching(path, model)


async def to_the_end(work: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
    """Do blocking work in a thread, then call `done`. A caller that is cancelled still waits for that."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # a scope would cancel again in every pass of the loop
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError as error:
                cancelled = error
    working.result()
    done()
    if cancelled is not None:
        raise cancelled

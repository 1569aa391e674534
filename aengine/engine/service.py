"""Serves a loaded model: makes the objects that handle requests, and runs the engine's tasks."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio

from aengine.config import EngineConfig
from aengine.engine.generation import Generation
from aengine.engine.loaded import Loaded
from aengine.engine.loop import StepLoop
from aengine.engine.pooled_answers import Pooling
from aengine.engine.requests.registry import Requests
from aengine.engine.sleep import DeviceChanges
from aengine.types import Stats

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

log = logging.getLogger("aengine")


class Service:
    """Owns the loaded model and the objects that handle requests. `start` starts its tasks. `stop` ends everything."""

    def __init__(self, config: EngineConfig, loaded: Loaded, failed: asyncio.Event) -> None:
        """failed: this object sets it when the engine has failed."""
        news = asyncio.Event()
        self.loaded = loaded
        self.requests = Requests(
            loaded.scheduler, news.set, priority_aging=config.priority_aging, most_held=config.max_queue
        )
        self.loop = StepLoop(
            loaded.scheduler,
            loaded.runtime.runner,
            news,
            lookahead=config.lookahead,
            fill_masks=loaded.grammars.fill,
            prepare_mask=loaded.grammars.prepare,
            fail=self.requests.fail_sequence,
            timeline=loaded.timeline,
            poll=loaded.poll,
            observers=loaded.observers,
        )
        self.generation = Generation(loaded, self.requests)
        self.pooling = Pooling(loaded, self.requests)
        self.changes = DeviceChanges(config, loaded, self.loop, self.requests)
        self._failed = failed
        self._ended = asyncio.Event()

    def start(self, tasks: TaskGroup) -> None:
        """Start the step loop, and the tasks that copy adapters and pages."""
        tasks.start_soon(self._serve)
        if self.loaded.adapters is not None:
            tasks.start_soon(self.loaded.adapters.run, self.loop.wake, self.requests.fail_sequence)
        if self.loaded.tier_tasks is not None:
            tasks.start_soon(self.loaded.tier_tasks.run, self.loop.wake)

    async def stop(self) -> None:
        """End all requests, wait for the last step, and close everything. A cancelled caller still waits."""
        self.requests.close()
        self.loop.stop()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def stats(self) -> Stats:
        """Return a snapshot of all statistics."""
        return self.loaded.stats(self.requests.ended, self.loop.last_step)

    async def _serve(self) -> None:
        """Run the step loop to its end, then close everything. No error leaves this task."""
        with anyio.CancelScope(shield=True):
            try:
                await self.loop.run()
            except Exception as error:  # a bug or a dead device
                log.critical("the engine failed", exc_info=error)
                self.requests.fail_all(error)
                self._failed.set()
            finally:
                async with self.changes.lock:  # waits for a running sleep or reload
                    await self.loaded.close()
                self._ended.set()

"""Measures the event loop's delay, which shows steps, parses and collections that block it."""

from __future__ import annotations

import time

import anyio
from anyio.abc import TaskStatus

_TICK = 0.01  # seconds between measurements, and their largest error; costs 0.3 % of a core
_SPAN = 60.0  # seconds; the worst delay is remembered for one to two spans


class LoopDelay:
    """The longest time that the loop was blocked within the last one to two spans."""

    def __init__(self) -> None:
        self._current = self._before = 0.0
        self._until = time.monotonic() + _SPAN

    @property
    def worst(self) -> float:
        """The worst delay, in seconds."""
        return max(self._current, self._before)

    async def watch(self, *, task_status: TaskStatus[anyio.CancelScope] = anyio.TASK_STATUS_IGNORED) -> None:
        """Measure until the cancel scope passed to `started` is cancelled."""
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            while True:
                began = time.monotonic()
                await anyio.sleep(_TICK)
                self.note(time.monotonic() - began - _TICK, began)

    def note(self, delay: float, now: float) -> None:
        """Add a measurement. now: the time at which it began, in monotonic seconds."""
        if now >= self._until:
            self._before = self._current if now < self._until + _SPAN else 0.0
            self._current, self._until = 0.0, now + _SPAN
        self._current = max(self._current, delay)

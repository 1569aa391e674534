"""Measures the event loop's delay, in which steps, parses and collections that block it show up."""

from __future__ import annotations

import time

import anyio
from anyio.abc import TaskStatus

_TICK = 0.01  # seconds: what it sees of a hold is at most so much too short; 0.3 % of a core
_SPAN = 60.0  # seconds that a worst delay is remembered for, at least


class LoopDelay:
    """The worst delay of a timer within the last one to two spans: how long the loop was held, a tick at most less."""

    def __init__(self) -> None:
        self._current = self._before = 0.0
        self._until = time.monotonic() + _SPAN

    @property
    def worst(self) -> float:
        """The worst delay, in seconds."""
        return max(self._current, self._before)

    async def watch(self, *, task_status: TaskStatus[anyio.CancelScope] = anyio.TASK_STATUS_IGNORED) -> None:
        """Measure until the scope that this hands out is cancelled."""
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            while True:
                began = time.monotonic()
                await anyio.sleep(_TICK)
                self.note(time.monotonic() - began - _TICK, began)

    def note(self, delay: float, now: float) -> None:
        """Add a measurement: seconds, and when."""
        if now >= self._until:
            self._before = self._current if now < self._until + _SPAN else 0.0
            self._current, self._until = 0.0, now + _SPAN
        self._current = max(self._current, delay)

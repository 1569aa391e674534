"""Returns memory to the system after many connections have closed.

A closed connection leaves about 80 objects of asyncio and hypercorn in reference cycles. Python collects cycles only
when new objects are made, and an idle server makes none. The C library also keeps freed memory until it is told to
return it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

MIN_PEAK = 1000  # connections open at once; fewer leave only a few megabytes
_DELAY = 2.0  # seconds before the call, in which the last connections close as well
# Seconds between two calls. A collection blocks the loop for tens of milliseconds, so clients must not force many.
_MIN_INTERVAL = 60.0


class MemoryReleaser:
    """Calls `release` when nine of ten connections have closed, if at least `MIN_PEAK` were open at once.

    There is at most one call in `_MIN_INTERVAL` seconds.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._most = 0
        self._next = 0.0  # on the loop's clock: the next call comes no earlier

    def grew(self, count: int) -> None:
        self._most = max(self._most, count)

    def shrank(self, count: int) -> None:
        if self._most >= MIN_PEAK and count <= self._most // 10:
            self._most = count
            loop = asyncio.get_running_loop()
            if (now := loop.time()) > self._next - _MIN_INTERVAL:  # else a call is scheduled
                when = max(now + _DELAY, self._next)
                self._next = when + _MIN_INTERVAL
                loop.call_at(when, self._release)


def return_memory() -> None:
    """Collect garbage, and let the C library return free memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another system, or another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)

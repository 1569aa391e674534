"""Returns memory to the system after many connections have closed.

A closed connection leaves about 80 objects of asyncio and hypercorn in reference cycles. Python collects cycles only
when new objects are made, which an idle server does not do. The C library would keep the freed memory as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

CROWD = 1000  # connections; fewer leave only a few megabytes
_SECONDS = 2.0  # after which the last of them are closed as well
_APART = (
    60.0  # seconds; a collection blocks the loop for tens of milliseconds, so clients must not be able to force many
)


class Crowd:
    """Calls `release` when nine of ten connections have closed, if at least `CROWD` were open at once.

    Crowds that follow each other within `_APART` seconds share a call.
    """

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._most = 0
        self._next = 0.0  # on the loop's clock: the next call comes no earlier

    def grew(self, count: int) -> None:
        self._most = max(self._most, count)

    def shrank(self, count: int) -> None:
        if self._most >= CROWD and count <= self._most // 10:
            self._most = count
            loop = asyncio.get_running_loop()
            if (now := loop.time()) > self._next - _APART:  # else a call is scheduled
                when = max(now + _SECONDS, self._next)
                self._next = when + _APART
                loop.call_at(when, self._release)


def return_memory() -> None:
    """Collect garbage, and let the C library return free memory to the system."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another system, or another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)

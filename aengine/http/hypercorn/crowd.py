"""Gives memory back once a crowd of connections has left.

A closed connection is some 80 objects that refer to each other, asyncio's and hypercorn's. Python looks for those only
when more objects are made, which an idle server doesn't do, and what it frees then the C library keeps.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress

CROWD = 1000  # connections; what fewer leave behind is a few megabytes
_SECONDS = 2.0  # for the last of them to be gone as well
_APART = 60.0  # seconds; a collection holds the loop for tens of milliseconds, which nobody may ask for at will


class Crowd:
    """Calls `give_back` after nine of ten have left who were there at once, if these were at least `CROWD`.

    Crowds that follow each other sooner than `_APART` share a call.
    """

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back = give_back
        self._most = 0
        self._next = 0.0  # of the loop's clock: no call before then

    def grew(self, count: int) -> None:
        self._most = max(self._most, count)

    def shrank(self, count: int) -> None:
        if self._most >= CROWD and count <= self._most // 10:
            self._most = count
            loop = asyncio.get_running_loop()
            if (now := loop.time()) > self._next - _APART:  # else one is on its way
                when = max(now + _SECONDS, self._next)
                self._next = when + _APART
                loop.call_at(when, self._give_back)


def give_back_memory() -> None:
    """Collect garbage and let the C library return what is free."""
    gc.collect()
    with suppress(OSError, AttributeError):  # of another system, or another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)

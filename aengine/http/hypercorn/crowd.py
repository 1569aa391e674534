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


class Crowd:
    """Calls `give_back` after nine of ten have left who were there at once, if these were at least `CROWD`."""

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back = give_back
        self._most = 0

    def grew(self, count: int) -> None:
        self._most = max(self._most, count)

    def shrank(self, count: int) -> None:
        if self._most >= CROWD and count <= self._most // 10:
            self._most = count
            asyncio.get_running_loop().call_later(_SECONDS, self._give_back)


def give_back_memory() -> None:
    """Collect garbage and let the C library return what is free: 20 microseconds for each connection that has left."""
    gc.collect()
    with suppress(OSError, AttributeError):  # of another system, or another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)

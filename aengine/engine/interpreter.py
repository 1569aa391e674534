"""Settings of the Python interpreter while models are loaded and images are read: garbage collection, and the GIL."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_SECONDS = 0.0005  # after this time a thread that waits for the GIL gets it; usually 5 ms
_MANY = 100_000  # objects; visiting them takes 15 ms


class QuickSwitches:
    """Lets threads pass on the GIL quickly while at least one `with` block runs.

    Otherwise a thread that needs the GIL for microseconds waits 5 ms each time.

    An interval that is already short is left to its owner, so that two owners never make it short for ever.
    """

    def __init__(self) -> None:
        self._users = 0
        self._usual: float | None = None  # the interval to restore

    def __enter__(self) -> None:
        self._users += 1
        if self._usual is None and (usual := sys.getswitchinterval()) > SWITCH_SECONDS:
            self._usual = usual
            sys.setswitchinterval(SWITCH_SECONDS)

    def __exit__(self, *error: object) -> None:
        self._users -= 1
        if not self._users and self._usual is not None:
            sys.setswitchinterval(self._usual)
            self._usual = None


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside the block, in any thread. Afterwards, new objects are in the oldest generation.

    Packages and vocabularies consist of millions of objects that stay alive. Scanning them repeatedly takes a sixth of
    the loading time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # `get_freeze_count` visits all frozen objects, so it is called only if there are many new objects.
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():  # unfreezing must not undo a freeze by the program
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation, which saves the next collection 0.15 s
        if enabled:
            gc.enable()

"""Turns garbage collection off while packages and vocabularies are loaded.

They consist of millions of objects that stay alive. Scanning them repeatedly takes a sixth of the loading time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MANY = 100_000  # objects; visiting them takes 15 ms


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage inside the block, in any thread. Afterwards, new objects are in the oldest generation."""
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

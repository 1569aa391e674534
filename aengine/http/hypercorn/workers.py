"""A lock that lets only one worker of a server start. A second worker would load the model again."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aengine.errors import ConfigError

if sys.platform != "win32":
    import fcntl


@contextmanager
def only_worker() -> Iterator[None]:
    """Hold the lock that sibling processes share. Raises `ConfigError` if a sibling holds it.

    Siblings are processes that one parent started through `multiprocessing`, as hypercorn starts its workers. They
    share an authentication key, from which the name of the lock file in the temporary folder is made. Servers that
    were started separately have different keys. The kernel releases the lock when the process ends.
    """
    if sys.platform == "win32" or multiprocessing.parent_process() is None:
        yield
        return
    family = hashlib.sha256(bytes(multiprocessing.current_process().authkey)).hexdigest()[:16]
    path = Path(tempfile.gettempdir(), f"aengine-{family}.lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "aengine runs in one process, but the server started several workers: start it with one (-w 1 or -w 0)"
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(file)

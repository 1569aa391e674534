"""Lets threads pass on the GIL quickly. Otherwise a thread that needs it for microseconds waits 5 ms each time."""

from __future__ import annotations

import sys

SWITCH_SECONDS = 0.0005  # after this time a thread that waits for the GIL gets it


class QuickSwitches:
    """Shortens the interval of the process while at least one `with` block of it runs.

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

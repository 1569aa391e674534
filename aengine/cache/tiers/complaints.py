"""Failures that come in rows, as from a full disk: the log gets a line when they begin, and one when they end."""

from __future__ import annotations

import logging

log = logging.getLogger("aengine")


class Complaints:
    """Logs the first of several failures in a row, and counts the others."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, message: str, *arguments: object) -> None:
        """Note a failure."""
        self._failures += 1
        if self._failures == 1:
            log.warning(message + "; further failures are counted until one succeeds", *arguments)

    def succeeded(self) -> None:
        """Note a success, which ends a row of failures."""
        if self._failures > 1:
            log.warning("disk_cache_dir: after %d failures, files can be changed again", self._failures)
        self._failures = 0

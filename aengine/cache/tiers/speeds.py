"""Decides whether copying pages from a lower tier is faster than computing them, from measured speeds."""

from __future__ import annotations

# Assumed until there is a measurement. Computing is slow and copies are fast, so that copies are tried and measured.
_COMPUTE = 10_000.0  # tokens/s
_HOST = 10e9  # bytes/s
_DISK = 1e9  # bytes/s
_NEW = 0.3  # weight of the newest measurement
_FEW_TOKENS = 64  # steps with fewer prompt tokens are not measured
OVERHEAD = 0.003  # seconds that a parked sequence waits in addition to the copy itself


class Speeds:
    """Moving averages of measured speeds."""

    def __init__(self) -> None:
        self.compute = 0.0  # tokens/s; 0: not measured yet
        self.host = 0.0  # bytes/s; 0: not measured yet
        self.disk = 0.0

    def add_compute(self, tokens: int, seconds: float) -> None:
        """Note the duration of a step with `tokens` prompt tokens."""
        if tokens >= _FEW_TOKENS:
            self.compute = _average(self.compute, tokens, seconds)

    def add_load(self, nbytes: int, seconds: float) -> None:
        """Note the duration of a copy from host memory to the device."""
        self.host = _average(self.host, nbytes, seconds)

    def add_read(self, nbytes: int, seconds: float) -> None:
        """Note the duration of a read from the disk into host memory."""
        self.disk = _average(self.disk, nbytes, seconds)

    def worth(self, tokens: int, nbytes: int, from_disk: int, ahead: int) -> bool:
        """Return whether copying the pages of `tokens` tokens takes less time than computing them.

        Args:
            nbytes: the size of the pages.
            from_disk: how many of these bytes have to be read from the disk first.
            ahead: bytes of the loads that are already queued.
        """
        copying = OVERHEAD + (nbytes + ahead) / (self.host or _HOST) + from_disk / (self.disk or _DISK)
        return copying < tokens / (self.compute or _COMPUTE)


def _average(old: float, amount: float, seconds: float) -> float:
    new = amount / max(seconds, 1e-6)
    return old + _NEW * (new - old) if old else new

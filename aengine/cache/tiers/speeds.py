"""Whether bringing pages from a lower tier is sooner than computing them, by what both took so far."""

from __future__ import annotations

# Until something was measured: too slow a computer and too fast a copy are found out by the first of each.
_COMPUTE = 10_000.0  # tokens/s
_HOST = 10e9  # bytes/s
_DISK = 1e9
_NEW = 0.3  # weight of what was measured last
_FEW_TOKENS = 64  # a step of fewer prompt tokens says nothing about long ones
OVERHEAD = 0.003  # seconds until a sequence that stands aside is back, beside the copy itself


class Speeds:
    """Moving averages of what was measured, in tokens and bytes per second."""

    def __init__(self) -> None:
        self.compute = 0.0  # 0: nothing measured
        self.host = 0.0
        self.disk = 0.0

    def computed(self, tokens: int, seconds: float) -> None:
        """A step that carried so many prompt tokens took so long."""
        if tokens >= _FEW_TOKENS:
            self.compute = _average(self.compute, tokens, seconds)

    def loaded(self, nbytes: int, seconds: float) -> None:
        """So many bytes went from host memory to the device."""
        self.host = _average(self.host, nbytes, seconds)

    def read(self, nbytes: int, seconds: float) -> None:
        """So many bytes were read from the disk into host memory."""
        self.disk = _average(self.disk, nbytes, seconds)

    def worth(self, tokens: int, nbytes: int, from_disk: int, ahead: int) -> bool:
        """Whether to bring `tokens` tokens instead of computing them.

        nbytes: theirs, of which `from_disk` have to be read first; ahead: bytes of other loads that come before.
        """
        bringing = OVERHEAD + (nbytes + ahead) / (self.host or _HOST) + from_disk / (self.disk or _DISK)
        return bringing < tokens / (self.compute or _COMPUTE)


def _average(old: float, amount: float, seconds: float) -> float:
    new = amount / max(seconds, 1e-6)
    return old + _NEW * (new - old) if old else new

"""How busy a replica is, as a router estimates it between two reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

_ANSWER = 128  # tokens of an answer nobody has seen yet
_ROWS_A_STEP = 64  # rows that together make a step about twice as long as one of them does


class Speed(msgspec.Struct, frozen=True):
    """What a replica can do, measured when it starts."""

    prefill: float = 1e-4  # seconds a token of a prompt
    step: float = 1e-2  # seconds a step that decodes one row
    rows: int = 256  # sequences that run at once


class Report(msgspec.Struct, frozen=True):
    """What a replica says of itself now and then."""

    running: int = 0  # requests, those included that wait
    waiting: int = 0  # of these, without a row
    kv_usage: float = 0.0  # share of the pool that running sequences hold
    speed: Speed = Speed()
    by_router: dict[str, int] = {}  # of these requests, those that a router sent

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Report | None:
        """Read what Ray carried; None where a replica has not reported yet."""
        return msgspec.convert(dict(stats), cls) if stats else None


class ReplicaLoad:
    """The work ahead of a replica, in seconds that a new prompt would wait for its first token.

    Prompts are computed one after the other, so a clock says when the last one will be done: it runs down by itself,
    and nobody has to tell when a prompt was. What others than this router sent is known from reports alone.
    """

    __slots__ = ("_busy_until", "_others", "_report", "_row_seconds", "_wait_seconds", "running", "speed")

    def __init__(self, speed: Speed) -> None:
        self.running = 0  # requests of this router
        self._others = 0  # requests of other routers, when last heard of
        self._busy_until = 0.0
        self._report: Report | None = None
        self._set_speed(speed)

    def _set_speed(self, speed: Speed) -> None:
        self.speed = speed
        # A row more makes every step of an answer longer, its own and those of its neighbours.
        self._row_seconds = speed.step * _ANSWER / _ROWS_A_STEP
        # Where every row is taken, one becomes free each time an answer ends.
        self._wait_seconds = 2 * speed.step * _ANSWER / speed.rows

    def delay(self, now: float) -> float:
        """Seconds of work ahead of a request that comes now."""
        running = self.running + self._others
        seconds = running * self._row_seconds
        if self._busy_until > now:
            seconds += self._busy_until - now
        if running >= self.speed.rows:
            seconds += (running - self.speed.rows + 1) * self._wait_seconds
        return seconds

    def sent(self, tokens: int, now: float) -> None:
        """Add a request of which so many tokens have to be computed."""
        self.running += 1
        self._busy_until = max(self._busy_until, now) + tokens * self.speed.prefill

    def ended(self) -> None:
        """Take a request away that was sent from here, however it ended."""
        self.running = max(0, self.running - 1)

    def reported(self, report: Report, router: str) -> None:
        """Take over what the replica says. Reports are old when they arrive: what this router sent is told apart by the
        replica itself, as it may have ended since.
        """
        if report is not self._report:
            self._report = report
            self._others = max(0, report.running - report.by_router.get(router, 0))
            if report.speed != self.speed:
                self._set_speed(report.speed)

"""Estimates how busy a replica is between two of its reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

_ANSWER = 128  # tokens expected of an answer
_ROWS_A_STEP = 64  # a step of this many rows takes about twice as long as a step of one


class Speed(msgspec.Struct, frozen=True):
    """How fast a replica is, measured when it starts."""

    prefill: float = 1e-4  # seconds per prompt token
    step: float = 1e-2  # seconds per decode step of one row
    rows: int = 256  # most sequences running at once


class Report(msgspec.Struct, frozen=True):
    """The state of a replica, which it reports from time to time."""

    running: int = 0  # requests, including waiting ones
    waiting: int = 0  # requests without a row
    kv_usage: float = 0.0  # share of the KV pool held by running sequences
    speed: Speed = Speed()
    by_router: dict[str, int] = {}  # number of these requests that each router sent

    @classmethod
    def from_stats(cls, stats: Mapping[str, Any]) -> Report | None:
        """Return the report in Ray's statistics; None if the replica has not reported yet."""
        return msgspec.convert(dict(stats), cls) if stats else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in seconds, derived from a replica's speed."""

    prefill: float  # per prompt token
    row: float  # added to each answer by one more running row, which makes every step longer
    wait: float  # until a row becomes free, for each request in front, if all rows are taken
    rows: int


@lru_cache(maxsize=2**12)  # replicas of equal speed share one object, which then stays in the processor's caches
def estimate_costs(speed: Speed) -> Costs:
    """Return the costs that a router computes with."""
    answer = speed.step * _ANSWER
    return Costs(speed.prefill, answer / _ROWS_A_STEP, 2 * answer / speed.rows, speed.rows)


class ReplicaLoad:
    """The work ahead of a replica: the seconds that a new prompt would wait for its first token.

    Prompts are computed one after the other, so one time, `busy_until`, says when the last of them will be done. The
    router also learns when a streamed request had its first token. It then sets the time again from the tokens that are
    still ahead: a replica that has become slower than it was measured does not look idle while prompts wait there.
    Requests of other routers are known from reports only.
    """

    __slots__ = ("_others", "_report", "_tokens_ahead", "_unreported_until", "busy_until", "costs", "running")

    def __init__(self, speed: Speed) -> None:
        self.running = 0  # requests of this router
        self._others = 0  # requests of other routers, at the last report
        self.busy_until = 0.0  # when all prompts ahead should be computed
        self._tokens_ahead = 0  # prompt tokens whose first token will be reported to `started`
        self._unreported_until = 0.0  # when the last prompt that is not reported should be computed
        self._report: Report | None = None
        self.costs = estimate_costs(speed)

    @property
    def steady(self) -> float:
        """Delay of a new request in seconds because of the running and waiting ones, whenever it arrives."""
        running, costs = self.running + self._others, self.costs
        return running * costs.row + max(0, running - costs.rows + 1) * costs.wait

    def delay(self, now: float) -> float:
        """Return the seconds of work ahead of a request that arrives at `now`."""
        return self.steady + max(0.0, self.busy_until - now)

    def sent(self, tokens: int, now: float, reports_start: bool = False) -> None:
        """Add a request with this many tokens to compute. reports_start: `started` will be called for it."""
        self.running += 1
        self.busy_until = max(self.busy_until, now) + tokens * self.costs.prefill
        if reports_start:
            self._tokens_ahead += tokens
        else:
            self._unreported_until = self.busy_until

    def started(self, tokens: int, when: float) -> None:
        """Note that an answer had its first token at `when`. tokens: the computed tokens of its prompt."""
        self._tokens_ahead = max(0, self._tokens_ahead - tokens)
        self.busy_until = max(when + self._tokens_ahead * self.costs.prefill, self._unreported_until)

    def ended(self) -> None:
        """Remove a request of this router, however it ended."""
        self.running = max(0, self.running - 1)
        if not self.running:  # no prompt is ahead, reported or not
            self._tokens_ahead, self._unreported_until, self.busy_until = 0, 0.0, 0.0

    def reported(self, report: Report, router: str) -> None:
        """Update from a report of the replica.

        A report is old when it arrives, and some requests of this router have ended since. So the replica itself counts
        the requests of each router in its report.
        """
        if report is not self._report:
            self._report = report
            self._others = max(0, report.running - report.by_router.get(router, 0))
            self.costs = estimate_costs(report.speed)

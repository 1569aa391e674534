"""How busy a replica is, as a router estimates it between two reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
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


@dataclass(frozen=True, slots=True)
class Costs:
    """What follows from a replica's speed, in seconds."""

    prefill: float  # a token of a prompt
    row: float  # a row more makes every step of an answer longer, its own and those of its neighbours
    wait: float  # where every row is taken, one becomes free each time an answer ends
    rows: int


@lru_cache(maxsize=2**12)  # one for all replicas of a kind: what is shared stays in the processor's caches
def costs_of(speed: Speed) -> Costs:
    """The costs that a router reckons with."""
    answer = speed.step * _ANSWER
    return Costs(speed.prefill, answer / _ROWS_A_STEP, 2 * answer / speed.rows, speed.rows)


class ReplicaLoad:
    """The work ahead of a replica, in seconds that a new prompt would wait for its first token.

    Prompts are computed one after the other, so a clock says when the last one will be done: it runs down by itself,
    and nobody has to tell when a prompt was. Where somebody does, the clock is set by what is still ahead then, so that
    a replica that is slower than it was when it was measured does not look idle while prompts wait there. What others
    than this router sent is known from reports alone.
    """

    __slots__ = ("_others", "_report", "_told", "_untold_until", "busy_until", "costs", "running")

    def __init__(self, speed: Speed) -> None:
        self.running = 0  # requests of this router
        self._others = 0  # requests of other routers, when last heard of
        self.busy_until = 0.0  # when the prompts ahead should be done
        self._told = 0  # tokens ahead of which `begun` will tell
        self._untold_until = 0.0  # when the last prompt of which it will not should be done
        self._report: Report | None = None
        self.costs = costs_of(speed)

    @property
    def steady(self) -> float:
        """Seconds that its requests, running or waiting for a row, cost a new one, whenever that comes."""
        running, costs = self.running + self._others, self.costs
        return running * costs.row + max(0, running - costs.rows + 1) * costs.wait

    def delay(self, now: float) -> float:
        """Seconds of work ahead of a request that comes now."""
        return self.steady + max(0.0, self.busy_until - now)

    def sent(self, tokens: int, now: float, told: bool = False) -> None:
        """Add a request of which so many tokens have to be computed; `told`: `begun` will say when they are."""
        self.running += 1
        self.busy_until = max(self.busy_until, now) + tokens * self.costs.prefill
        if told:
            self._told += tokens
        else:
            self._untold_until = self.busy_until

    def begun(self, tokens: int, when: float) -> None:
        """Note that the first token of an answer was there at `when`: so many tokens of its prompt are computed."""
        self._told = max(0, self._told - tokens)
        self.busy_until = max(when + self._told * self.costs.prefill, self._untold_until)

    def ended(self) -> None:
        """Take a request away that was sent from here, however it ended."""
        self.running = max(0, self.running - 1)
        if not self.running:  # nothing is ahead, whatever was not told
            self._told, self._untold_until, self.busy_until = 0, 0.0, 0.0

    def reported(self, report: Report, router: str) -> None:
        """Take over what the replica says. Reports are old when they arrive: what this router sent is told apart by the
        replica itself, as it may have ended since.
        """
        if report is not self._report:
            self._report = report
            self._others = max(0, report.running - report.by_router.get(router, 0))
            self.costs = costs_of(report.speed)

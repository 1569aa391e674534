"""Traffic for a simulation of routing: chats, agents whose prompts begin alike, and one hot beginning."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


@dataclass(frozen=True)
class Kind:
    """A kind of session. Lengths are means, in tokens: of an exponential distribution, but for `prefix`."""

    share: float  # of the requests
    prefixes: int  # different beginnings
    prefix: int
    question: int
    answer: int
    turns: float
    think: float  # seconds between an answer and the next question


KINDS = (
    Kind(share=0.6, prefixes=20, prefix=300, question=100, answer=200, turns=6, think=4.0),  # chats
    Kind(share=0.3, prefixes=40, prefix=4000, question=400, answer=60, turns=10, think=0.5),  # agents
    Kind(share=0.1, prefixes=1, prefix=6000, question=50, answer=150, turns=1, think=0.0),  # the hot beginning
)


class Session:
    """A conversation: its tokens so far, and the number of turns left."""

    __slots__ = ("context", "kind", "number", "turns")

    def __init__(self, number: int, kind: Kind, turns: int, context: array[int]) -> None:
        self.number = number
        self.kind = kind
        self.turns = turns
        self.context = context


class Request:
    """One request: the ids of its prompt and its answer, and the number of tokens computed for earlier requests."""

    __slots__ = ("answer", "cacheable", "ids", "owner", "session", "time")

    def __init__(self, when: float, owner: Session, ids: array[int], answer: array[int], cacheable: int) -> None:
        self.time = when
        self.session = owner.number
        self.owner = owner
        self.ids = ids
        self.answer = answer
        self.cacheable = cacheable


class Traffic:
    """So many requests, at about `rate` a second: sessions arrive by a Poisson process, and turns follow answers.

    The first tenth comes slowly: caches are as empty as after a start.
    """

    def __init__(self, rate: float, requests: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._requests = requests
        self._numbers = count()
        shares = [kind.share / kind.turns for kind in KINDS]
        self._gap = 1 / (rate * sum(shares))  # seconds between two sessions
        self._weights = shares
        self._prefixes = [[self._ids(kind.prefix) for _ in range(kind.prefixes)] for kind in KINDS]
        self._sent: set[tuple[int, int]] = set()  # (kind, prefix) of earlier requests
        self._next: list[tuple[float, int, Session]] = []

    def __iter__(self) -> Iterator[Request]:
        arrival, now = 0.0, 0.0
        for sent in range(self._requests):
            ramp = min(1.0, 0.1 + 9 * sent / self._requests)
            while not self._next or self._next[0][0] > arrival:
                arrival += self._random.expovariate(ramp / self._gap)
                self._begin(arrival)
            when, _, session = heappop(self._next)
            now = max(now, when)  # an answer may have ended a moment before the newest request
            yield self._turn(session, now)

    def answered(self, request: Request, when: float) -> None:
        """Let the session go on after an answer."""
        session = request.owner
        session.turns -= 1
        if session.turns > 0:
            session.context = request.ids + request.answer
            think = session.kind.think * (0.5 + 0.5 * self._random.expovariate(1))
            heappush(self._next, (when + think, next(self._numbers), session))

    def _begin(self, when: float) -> None:
        (place,) = self._random.choices(range(len(KINDS)), self._weights)
        kind = KINDS[place]
        turns = 1 if kind.turns == 1 else min(4 * int(kind.turns), 1 + int(self._random.expovariate(1 / kind.turns)))
        which = self._random.randrange(kind.prefixes)
        session = Session(next(self._numbers), kind, turns, self._prefixes[place][which])
        if (place, which) not in self._sent:
            self._sent.add((place, which))
            session.number = -1 - session.number  # the first of its kind: nothing of it was computed before
        heappush(self._next, (when, next(self._numbers), session))

    def _turn(self, session: Session, when: float) -> Request:
        known = len(session.context)
        if session.number < 0:
            session.number, known = -1 - session.number, 0
        question = self._ids(1 + int(self._random.expovariate(1 / session.kind.question)))
        answer = self._ids(1 + int(self._random.expovariate(1 / session.kind.answer)))
        return Request(when, session, session.context + question, answer, known)

    def _ids(self, many: int) -> array[int]:
        ids = array("I")
        ids.frombytes(self._random.randbytes(4 * many))
        return ids

"""Simulates routing by prefix: the router's own code with stand-in replicas, compared with three other policies.

    python bench/routing.py --replicas 64 1024 --requests 1000000 --out routing.jsonl
    python bench/plot.py routing.jsonl --x replicas --y ttft_ms_p99 --by policy --log-x --log-y --out routing.svg

A stand-in replica has the engine's radix tree and page allocator, and steps of measured length. The traffic has chats
of several turns, agents of few kinds whose long prompts begin alike, and one prompt with which a tenth of all requests
begin. After half of the run a third of the replicas can be lost and replaced by empty ones (`--lose`).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that the script runs from anywhere

from aengine.ray_serve.routing.load import Report
from aengine.ray_serve.routing.prompt import Prompt, prompt_from_ids
from aengine.ray_serve.routing.router import PrefixRouter
from bench.results import Report as BenchReport
from bench.routing_replica import SPEED, StandIn
from bench.routing_traffic import Request, Traffic

REPLACED_AFTER = 10.0  # seconds until a replica that was lost is there again, with nothing cached
AGAIN = 16  # one of this number of decisions is made twice
REPORTS_EVERY = 1.0  # seconds, as in Ray Serve's controller


class Policy(Protocol):
    """Sends requests to replicas, which are numbers."""

    name: str

    def join(self, replica: int) -> None: ...

    def leave(self, replica: int) -> None: ...

    def choose(self, request: Request, prompt: Prompt, now: float) -> int: ...


class ByPrefix:
    """The router that is shipped."""

    name = "prefix"

    def __init__(self, seed: int) -> None:
        self.router: PrefixRouter[int] = PrefixRouter(seed=seed)

    def join(self, replica: int) -> None:
        self.router.join(replica, SPEED)

    def leave(self, replica: int) -> None:
        self.router.leave(replica)

    def choose(self, request: Request, prompt: Prompt, now: float) -> int:
        return self.router.choose(prompt, now)


class Random:
    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._live: list[int] = []

    def join(self, replica: int) -> None:
        self._live.append(replica)

    def leave(self, replica: int) -> None:
        self._live.remove(replica)

    def choose(self, request: Request, prompt: Prompt, now: float) -> int:
        return self._random.choice(self._live)


class LeastLoaded:
    """The replica with the fewest requests in flight, exactly known; of several one at random."""

    name = "least loaded"

    def __init__(self, seed: int, running: Callable[[int], int]) -> None:
        self._random = random.Random(seed)
        self._live: set[int] = set()
        self._running = running
        self._queue: list[tuple[int, float, int]] = []  # (requests, a random number, replica); some are out of date

    def join(self, replica: int) -> None:
        self._live.add(replica)
        self.changed(replica)

    def leave(self, replica: int) -> None:
        self._live.discard(replica)

    def changed(self, replica: int) -> None:
        heappush(self._queue, (self._running(replica), self._random.random(), replica))

    def choose(self, request: Request, prompt: Prompt, now: float) -> int:
        while True:
            running, _, replica = heappop(self._queue)
            if replica in self._live and running == self._running(replica):
                return replica


class ConsistentHashing:
    """Route by session, on a hash ring with 64 points for each replica."""

    name = "consistent hashing"

    def __init__(self) -> None:
        self._ring: list[tuple[int, int]] = []

    def join(self, replica: int) -> None:
        self._ring += [(_point(f"{replica} {copy}"), replica) for copy in range(64)]
        self._ring.sort()

    def leave(self, replica: int) -> None:
        self._ring = [point for point in self._ring if point[1] != replica]

    def choose(self, request: Request, prompt: Prompt, now: float) -> int:
        place = bisect_left(self._ring, (_point(str(request.session)), 0))
        return self._ring[place % len(self._ring)][1]


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


class Simulation:
    """One policy, some replicas, one stream of requests."""

    def __init__(self, policy_name: str, replicas: int, requests: int, load: float, lose: bool, seed: int) -> None:
        self.replicas = [StandIn() for _ in range(replicas)]
        self.policy = self._policy(policy_name, seed)
        for replica in range(replicas):
            self.policy.join(replica)
        self.traffic = Traffic(rate=load * replicas, requests=requests, seed=seed)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.numbers = 0
        self.requests = requests
        self.lose_at = requests // 2 if lose else -1
        self.random = random.Random(seed + 1)
        self.done = 0
        self.lost = 0
        self.prompt_tokens = self.cacheable_tokens = self.cached_tokens = 0
        self.first_tokens: array[float] = array("d")
        self.decisions: array[float] = array("d")  # CPU seconds of each choice
        self.again: array[float] = array("d")  # CPU seconds of decisions made a second time, with warm caches
        self.notes: array[float] = array("d")  # CPU seconds of recording a sent request
        self.window: list[tuple[int, int]] = []  # (cacheable tokens, cached) after each hundredth of the requests
        self.now = 0.0

    def _policy(self, name: str, seed: int) -> Policy:
        if name == ByPrefix.name:
            return ByPrefix(seed)
        if name == Random.name:
            return Random(seed)
        if name == LeastLoaded.name:
            return LeastLoaded(seed, lambda replica: self.replicas[replica].running)
        return ConsistentHashing()

    def at(self, when: float, what: Callable[[float], None]) -> None:
        self.numbers += 1
        heappush(self.events, (when, self.numbers, what))

    def run(self) -> None:
        router = self.policy.router if isinstance(self.policy, ByPrefix) else None
        if router is not None:
            self.at(REPORTS_EVERY, self._report)
        for request in self.traffic:
            while self.events and self.events[0][0] <= request.time:
                self.now, _, what = heappop(self.events)
                what(self.now)
            self.now = request.time
            self._send(request, router)
            if self.done == self.lose_at:
                self._lose()
            if self.done % max(1, self.requests // 20) == 0:
                so_far = json.dumps({name: value and float(f"{value:.5g}") for name, value in self.figures().items()})
                spent = f"{self.done:,} of {self.requests:,} after {time.process_time():.0f} s"
                print(f"{spent}: {so_far}", file=sys.stderr, flush=True)

    def _send(self, request: Request, router: PrefixRouter[int] | None) -> None:
        now, missing = request.time, 0
        if router is None:
            prompt = Prompt()
            began = time.thread_time()
            chosen = self.policy.choose(request, prompt, now)
            self.decisions.append(time.thread_time() - began)
        else:
            prompt = prompt_from_ids(request.ids)
            began = time.thread_time()
            chosen = router.choose(prompt, now)
            self.decisions.append(time.thread_time() - began)
            if self.done % AGAIN == 0:
                began = time.thread_time()
                router.choose(prompt, now)
                self.again.append(time.thread_time() - began)
            began = time.thread_time()
            missing = prompt.tokens - router.sent(chosen, prompt, now, reports_start=True)
            self.notes.append(time.thread_time() - began)
        replica = self.replicas[chosen]
        if isinstance(self.policy, LeastLoaded):
            self.at(now, lambda _: self.policy.changed(chosen))  # type: ignore[attr-defined]
        self.done += 1
        if self.done % max(1, self.requests // 100) == 0:
            self.window.append((self.cacheable_tokens, self.cached_tokens))

        def first(when: float, cached: int) -> None:
            self.first_tokens.append(when - request.time)
            self.prompt_tokens += len(request.ids)
            self.cacheable_tokens += request.cacheable
            self.cached_tokens += cached
            if router is not None and self.replicas[chosen] is replica:
                router.started(chosen, missing, when)

        def ended(when: float) -> None:
            if router is not None and self.replicas[chosen] is replica:
                router.ended(chosen)
            elif isinstance(self.policy, LeastLoaded) and self.replicas[chosen] is replica:
                self.policy.changed(chosen)
            self.traffic.answered(request, when)

        replica.serve(request.ids, request.answer, prompt, now, self.at, first, ended)
        if router is not None:  # the replica reports with the first words of an answer
            changes = replica.cached.changes("router")
            if changes.evicted:
                router.evicted(chosen, changes.evicted)

    def _report(self, now: float) -> None:
        if isinstance(self.policy, ByPrefix):
            for number, replica in enumerate(self.replicas):
                report = Report(
                    running=replica.running, waiting=len(replica.waiting), speed=SPEED, by_router={"": replica.running}
                )
                self.policy.router.reported(number, report)
            self.at(now + REPORTS_EVERY, self._report)

    def _lose(self) -> None:
        """Every third replica is gone, with all that runs there; an empty one takes its place later."""
        for number in self.random.sample(range(len(self.replicas)), len(self.replicas) // 3):
            self.policy.leave(number)
            self.lost += self.replicas[number].running
            self.replicas[number].gone = True
            self.replicas[number] = StandIn()
            self.at(self.now + REPLACED_AFTER, lambda _, number=number: self.policy.join(number))  # type: ignore[misc]

    def figures(self) -> dict[str, float | None]:
        first = sorted(self.first_tokens) or [0.0]
        work = [replica.occupied for replica in self.replicas]
        decisions, again = sorted(self.decisions), sorted(self.again)
        return {
            "found": self.cached_tokens / (self.cacheable_tokens or 1),
            "hit_rate": self.cached_tokens / (self.prompt_tokens or 1),
            "ttft_ms_p50": 1e3 * first[len(first) // 2],
            "ttft_ms_p99": 1e3 * first[int(0.99 * len(first))],
            "imbalance": max(work) / ((sum(work) or 1.0) / len(work)),
            "decision_us_mean": 1e6 * sum(decisions) / len(decisions),
            "decision_us_p99": 1e6 * decisions[int(0.99 * len(decisions))],
            "again_us_mean": 1e6 * sum(again) / len(again) if again else None,
            "again_us_p99": 1e6 * again[int(0.99 * len(again))] if again else None,
            "noting_us_mean": 1e6 * sum(self.notes) / len(self.notes) if self.notes else None,
            "lost_streams": self.lost,
        }

    def hit_rates(self) -> list[float]:
        """Of each hundredth of the requests."""
        ends = [(0, 0), *self.window]
        pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(ends)]
        return [cached / max(1, asked) for asked, cached in pairs]


POLICIES = (ByPrefix.name, LeastLoaded.name, ConsistentHashing.name, Random.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--load", type=float, default=16.0, help="requests per second and replica")
    parser.add_argument("--lose", action="store_true", help="lose a third of the replicas half of the way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = BenchReport("routing", options.out)
    for replicas in options.replicas:
        for policy in options.policy:
            simulation = Simulation(policy, replicas, options.requests, options.load, options.lose, options.seed)
            gc.disable()  # a walk over millions of objects now and then would be seen as the router's
            simulation.run()
            gc.enable()
            case = {"replicas": replicas, "policy": policy, "requests": options.requests, "lost": int(options.lose)}
            detail = {"hit_rates": [round(rate, 4) for rate in simulation.hit_rates()], "seconds": simulation.now}
            report.tell(case, simulation.figures(), detail=detail)
    report.print_table()


if __name__ == "__main__":
    main()

"""What a step costs the scheduler while many wait, or while much is cached. No model, no device."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from dataclasses import dataclass

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import StepPlan, StepResult

ROWS = 32
PAGE = 16
PROMPT = 64
OUTPUT = 64  # with ROWS sequences: one leaves and one enters every other step
PAGES_PER_ROW = (PROMPT + OUTPUT) // PAGE + 1


@dataclass(frozen=True)
class StepCost:
    """Microseconds of `schedule` and `commit` together, and of `add`."""

    step: float  # median
    step_mean: float
    step_p99: float
    add: float  # median


class Churn:
    """A scheduler whose rows and pages are all in use. A request that ends makes room for a waiting one."""

    def __init__(self, waiting: int, cached: int) -> None:
        pages = 1 + ROWS * PAGES_PER_ROW + cached
        self.scheduler = Scheduler(
            num_pages=pages, page_size=PAGE, max_rows=ROWS, max_step_tokens=512, max_queue=waiting + ROWS + 1
        )
        self._numbers = itertools.count()
        self._drawn = itertools.count()
        self._in_flight: deque[StepPlan] = deque()
        self._waiting = waiting
        memory = self.scheduler.memory
        for number in range(cached):  # each a node of its own
            memory.tree.insert([2**31 + number] * PAGE, memory.allocator.take(1))
        for number in range(ROWS):  # of staggered lengths, so that they do not leave together
            self.add(PROMPT, 1 + (number + 1) * OUTPUT // ROWS)
            self.step()
        self.fill()

    def add(self, prompt: int, output: int) -> float:
        """Enqueue a request like no other; the seconds that it took."""
        number = next(self._numbers)
        tokens = [(number * PROMPT + place) % 2**30 for place in range(prompt)]
        sequence = Sequence(
            prompt=packed(tokens),
            params=SamplingParams(max_tokens=output),
            seed=number,
            stop_ids=(),
            max_total=prompt + output,
            rank=(float(number), number),
        )
        began = time.perf_counter()
        self.scheduler.add(sequence)
        return time.perf_counter() - began

    def fill(self) -> list[float]:
        """Fill the queue. Returns the seconds of each `add`."""
        return [self.add(PROMPT, OUTPUT) for _ in range(self._waiting - self.scheduler.waiting)]

    def step(self) -> float:
        """Schedule a step, then commit the one before it; the seconds that the two took."""
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        spent = time.perf_counter() - began
        if plan is not None:
            self._in_flight.append(plan)
        if len(self._in_flight) > 1 or plan is None:
            done = self._in_flight.popleft()
            draws = len(done.sampled_rows)
            result = StepResult([next(self._drawn) % 2**30 for _ in range(draws)], [True] * draws, None)
            began = time.perf_counter()
            self.scheduler.commit(done, result)
            spent += time.perf_counter() - began
        return spent


def step_cost(waiting: int, cached: int, steps: int = 2000) -> StepCost:
    """Measure with a constant number of waiting requests and of nodes in the radix tree."""
    churn = Churn(max(waiting, 1), cached)
    for _ in range(3 * OUTPUT):
        churn.step()
        churn.fill()
    spent, added = [], []
    for _ in range(steps):
        spent.append(churn.step())
        added += churn.fill()
    churn.scheduler.check_integrity()
    spent.sort()
    return StepCost(
        step=1e6 * statistics.median(spent),
        step_mean=1e6 * statistics.fmean(spent),
        step_p99=1e6 * spent[int(len(spent) * 0.99)],
        add=1e6 * statistics.median(added),
    )

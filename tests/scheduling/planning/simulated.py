"""Runs the choice of drafts on simulated rows and steps: no scheduler, no device."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.planning.drafting import Drafting
from aengine.scheduling.sequence import Sequence
from aengine.step_cost import StepCost
from aengine.step_plan import StepPlan

CONTEXT = 1000  # tokens of each row


@dataclass(frozen=True)
class Device:
    """The true times of steps: (tokens, time) points, and shares of a step of as many tokens as rows."""

    points: tuple[tuple[int, float], ...]
    row: float  # for reading the keys and values of a row
    draft: float
    reading: float
    block: float = 0.0  # for all proposals together, of a step of as many tokens as the blocks
    padded: bool = False  # whether all rows take as long as the one with the most drafts, verified or made

    def time(self, rows: int, drafts: int, proposals: int, is_read: bool) -> float:
        """Return the time of a step that verifies so many drafts in all rows together."""
        forward = self._forward(rows + drafts) * (1 + self.reading * is_read)
        block = self.block * self._forward(rows * (1 + proposals)) if proposals else 0.0
        return forward + self.draft * proposals * self._forward(rows) + block + self.row * rows

    def _forward(self, tokens: int) -> float:
        points = self.points
        place = next((i for i, (end, _) in enumerate(points[1:]) if tokens <= end), len(points) - 2)
        (low, before), (high, after) = points[place : place + 2]
        return before + (after - before) * (tokens - low) / (high - low)

    def best_rate(self, rows: int, rate: float, most: int) -> float:
        """Return the most tokens per time with a fixed number of drafts, or with none."""
        rates = [self.plain_rate(rows)]
        for drafts in range(1, most + 1):
            tokens = rows * sum(rate**count for count in range(drafts + 1))
            rates.append(tokens / self.time(rows, rows * drafts, drafts, True))
        return max(rates)

    def plain_rate(self, rows: int) -> float:
        """Return the tokens per time without speculation."""
        return rows / self.time(rows, 0, 0, False)


# Qwen3-8B in bf16 on an H200, with an MTP layer.
H200 = Device(
    ((1, 1.0), (16, 1.02), (32, 1.05), (64, 1.1), (128, 1.35), (256, 2.1), (512, 3.6), (1024, 6.6)), 0.01, 0.06, 0.03
)
H200_COST = StepCost(free_tokens=150, draft=0.06, reading=0.03, context=1e-5)
# Captured steps.
PADDED, PADDED_COST = replace(H200, padded=True), replace(H200_COST, padded=True)
# The same with a DFlash head of five layers.
BLOCKS = replace(H200, draft=0.0, reading=0.015, block=0.2)
BLOCKS_COST = StepCost(free_tokens=150, draft=0.0, reading=0.015, block=0.19, context=1e-5)
# A small model on two cores: tokens cost nearly as much as the step.
CPU = Device(((1, 1.0), (8, 2.0), (64, 10.0)), 0.05, 0.1, 0.05)
CPU_COST = StepCost(free_tokens=8, draft=0.1, reading=0.05)


@dataclass
class Simulation:
    """Rows that draft on a device. A step is committed after the next one is planned, as with lookahead.

    `accepts(step, row)` is the probability that a draft is accepted. A row with a gap accepts `gap` times as many. Rows
    are replaced by new ones after `life` steps; 0: never.
    """

    device: Device
    cost: StepCost
    rows: int
    accepts: Callable[[int, int], float]
    most: int = 5
    life: int = 0
    gap: float = 1.0
    noise: float = 0.0  # standard deviation of the logarithms of times
    slowness: float = 1.0  # factor of the times that are measured
    random: random.Random = field(default_factory=lambda: random.Random(0))
    step: int = 0
    newest: list[int] = field(default_factory=list)  # the drafts of each row in the newest step
    tokens: float = 0.0
    time: float = 0.0
    seen: Counter[int] = field(default_factory=Counter)  # most drafts of a row -> steps; -1: the proposer did not run

    def __post_init__(self) -> None:
        self.drafting = Drafting(self.most, self.cost)
        self.sequences = [row() for _ in range(self.rows)]
        self._pending: tuple[StepPlan, float, list[tuple[Sequence, int, int]]] | None = None

    def run(self, steps: int) -> float:
        """Run steps. Returns the expected tokens per time."""
        self.tokens = self.time = 0.0
        self.seen.clear()
        for _ in range(steps):
            self._run_step()
        return self.tokens / self.time

    def _run_step(self) -> None:
        drafting, rows = self.drafting, self.rows
        if self.life and self.step * rows // self.life != (self.step - 1) * rows // self.life:
            self.sequences[self.random.randrange(rows)] = row()
        plan = StepPlan(self.step, [], [], list(range(rows)), [], [], contexts=[CONTEXT] * rows)
        drafting.begin(self.sequences, plan, rows * self.most)
        drafts = self.newest = [drafting.wanted(sequence) for sequence in self.sequences]
        plan.drafts = drafts if any(drafts) else ()
        for sequence in self.sequences:
            sequence.proposed = plan.proposals
            sequence.has_gap |= not plan.is_read
        if self._pending is not None:
            before, seconds, verified = self._pending
            drafting.observe_time(before, seconds)
            for sequence, count, accepted in verified:
                drafting.observe(sequence, count, accepted)
        verifying = sum(drafts)
        if self.device.padded:
            plan_drafts = max(plan.proposals, *drafts)
            verifying, plan_proposals = rows * plan_drafts, plan_drafts
        else:
            plan_proposals = plan.proposals
        time = self.device.time(rows, verifying, plan_proposals, plan.is_read)
        verified = [self._verify(i, count) for i, count in enumerate(drafts) if count]
        self._pending = plan, 0.01 * time * self.slowness * math.exp(self.random.gauss(0, self.noise)), verified
        self.tokens += rows - len(verified)
        self.time += time
        self.seen[max(drafts) if plan.is_read else -1] += 1
        self.step += 1

    def _verify(self, index: int, drafts: int) -> tuple[Sequence, int, int]:
        sequence, rate = self.sequences[index], self.accepts(self.step, index)
        rate *= self.gap if sequence.has_gap else 1
        accepted = 0
        while accepted < drafts and self.random.random() < rate:
            accepted += 1
        self.tokens += sum(rate**count for count in range(drafts + 1))
        return sequence, drafts, accepted


def row() -> Sequence:
    """Return a sequence that decodes without an end."""
    sequence = Sequence(packed([1]), SamplingParams(), 0, (), 2**60, (0.0, 0))
    sequence.decoding, sequence.launched = True, CONTEXT
    return sequence

"""How long steps that decode take, relative to each other: `StepCost` before any was measured, `MeasuredCost` later."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from aengine.step_plan import StepPlan

KEPT = 32  # the newest times of each kind of step
SURE = 5  # times of a kind after which their mean is trusted
MOST_TRIALS = 3  # of a kind, if its steps cannot be measured
FORGOTTEN_AFTER = 4096  # measured steps of a batch size after which a kind of step that was not measured is unknown
# Measured steps of a batch size between two checks of its time without drafts: if drafts gain little, and if they gain
# much.
RECHECK_SOON, RECHECK_EVERY = 192, 1024
CLEAR_GAIN = 1.25  # a factor of the rate
REPLACED_AFTER = 64  # measured steps after which newer times without drafts replace the older ones, not join them
FOLLOWED = 0.3  # share of a deviation by which all times of a batch size follow the newest one
MOST_FOLLOWED = 0.5  # the largest deviation that counts, as a logarithm


@dataclass(frozen=True, slots=True)
class StepCost:
    """A rough estimate of the time of steps that only decode. The unit is the time of a step of one token.

    A step reads all weights and computes its tokens. Reading takes the same time for any number of tokens.
    """

    free_tokens: float = 150.0  # number of tokens whose computation takes as long as reading the weights
    draft: float = 0.06  # share of a step that the proposer takes for each draft that it makes in all rows
    # Share of a step that the proposer takes if it only reads the step's tokens. 0: it reads every step.
    reading: float = 0.03
    block: float = 0.0  # share of a step for a run that makes all drafts at once, if the proposer has such runs
    context: float = 0.0  # share of a step for reading the keys and values of one token
    # Whether all rows take as long as the one with the most drafts, verified or made. Captured steps do.
    padded: bool = False
    is_measured: bool = True  # whether the times of steps correct the estimate

    def __post_init__(self) -> None:
        """Raises `ValueError` if a value is not above 0, or a share is below 0."""
        if self.free_tokens <= 0 or min(self.draft, self.reading, self.block, self.context) < 0:
            raise ValueError(f"free_tokens must be above 0, the shares at least 0, got {self}")

    def time(self, rows: int, tokens: int, context: int, proposals: int, is_read: bool) -> float:
        """Return the time of a step.

        Args:
            rows: the sequences that decode.
            tokens: all tokens of the step, with the drafts that it verifies.
            context: the lengths of all sequences together.
            proposals: the drafts that each row makes for the next step.
            is_read: whether the proposer reads the step's tokens.
        """
        time = self._forward(tokens) * (1 + self.reading * is_read) + self.context * context
        return time + self.proposing(rows, proposals)

    def proposing(self, rows: int, proposals: int) -> float:
        """Return the part of a step's time in which the proposer makes drafts."""
        block = self.block * self._forward(rows * (1 + proposals)) if proposals else 0.0
        return self.draft * proposals * self._forward(rows) + block

    def _forward(self, tokens: int) -> float:
        """Return the time of a forward pass. It is smooth where computing begins to take longer than reading."""
        return math.hypot(1.0, tokens / self.free_tokens)


# Drafts take no time, so each row always verifies as many as it may.
FREE = StepCost(free_tokens=math.inf, draft=0.0, reading=0.0, is_measured=False)


class _Size:
    """The measured steps of one range of batch sizes. Times are logarithms, relative to `StepCost`.

    The kind of a step is the number of drafts of a row on average, in quarters.
    """

    __slots__ = ("kinds", "level", "measured_at", "steps", "trials")

    def __init__(self, level: float) -> None:
        self.level = level  # common to all kinds
        self.kinds: dict[float, deque[float]] = {}  # kind -> its newest times, relative to `level`
        self.measured_at: dict[float, int] = {}  # kind -> the step that measured it last
        self.trials: dict[float, int] = {}  # kind -> how often it was tried because it was unknown
        self.steps = 0

    def add(self, kind: float, time: float) -> None:
        """Note the time of a step."""
        times = self.kinds.setdefault(kind, deque(maxlen=KEPT))
        if not kind and self.steps - self.measured_at.get(kind, self.steps) >= REPLACED_AFTER:
            times.clear()
        if len(times) >= SURE:  # the kind is known, so a deviation concerns all kinds: the device got slower
            deviation = time - self.level - _midmean(times)
            self.level += FOLLOWED * max(-MOST_FOLLOWED, min(deviation, MOST_FOLLOWED))
        times.append(time - self.level)
        self.steps += 1
        self.measured_at[kind] = self.steps
        if len(times) >= SURE:  # after it is forgotten, it may be tried as often again
            self.trials.pop(kind, None)

    def is_known(self, kind: float) -> bool:
        """Return whether the time of a kind of step was measured often enough, and not too long ago."""
        age = self.steps - self.measured_at.get(kind, -FORGOTTEN_AFTER)
        return age < FORGOTTEN_AFTER and len(self.kinds[kind]) >= SURE

    def offset(self, kind: float) -> float:
        """Return the deviation of a kind of step, in between those of the nearest kinds that were measured."""
        if known := self.kinds.get(kind):
            return _midmean(known)
        below = max((other for other in self.kinds if other < kind), default=None)
        above = min((other for other in self.kinds if other > kind), default=None)
        if below is None or above is None:
            nearest = above if below is None else below
            return 0.0 if nearest is None else _midmean(self.kinds[nearest])
        low, high = _midmean(self.kinds[below]), _midmean(self.kinds[above])
        return low + (high - low) * (kind - below) / (above - below)

    def wants_check(self, gain: float) -> bool:
        """Return whether the time without drafts is unknown or was measured long ago. gain: of the rate by drafts."""
        age = self.steps - self.measured_at.get(0, 0)
        return age >= (RECHECK_EVERY if gain >= CLEAR_GAIN else RECHECK_SOON) or not self.is_known(0)


class MeasuredCost:
    """Estimates the time of a step for each number of drafts.

    Times of similar batch sizes count together. A step is measured if it has no prompt tokens, and makes as many drafts
    for the next step as its drafting rows verify. If only some rows verify drafts, the step counts as one in which each
    row verifies fewer.
    """

    def __init__(self, prior: StepCost) -> None:
        """prior: the estimate before the first measurement."""
        self.prior = prior
        self._sizes: dict[int, _Size] = {}  # by the number of bits of the number of rows

    def time(self, rows: int, context: int, drafts: int, drafting: int, is_read: bool) -> float:
        """Return the time of a step. Two times of the same rows can be compared.

        Args:
            context: the lengths of all rows together.
            drafts: how many drafts each drafting row verifies, and each row makes for the next step.
            drafting: how many rows verify drafts.
            is_read: whether the proposer reads the step's tokens. True if there are drafts.
        """
        prior, verified = self.prior, self._verified(rows, drafts, drafting)
        time = prior.time(rows, rows + verified, context, drafts, is_read) * self._factor(rows, _kind(rows, verified))
        if not is_read:
            return time
        # More work does not take less time. Measurements are not that exact.
        overhead = (prior.reading + prior.draft * drafts + prior.block * (drafts > 0)) / 2
        return max(time, (1 + overhead) * self.time(rows, context, 0, 0, False))

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Note how long a step took."""
        rows = len(plan.decode)
        if plan.prefill or plan.encodings or not rows or seconds <= 0 or not self.prior.is_measured:
            return
        drafts, verified = max(plan.drafts, default=0), sum(plan.drafts)
        if self.prior.padded:
            drafts = max(drafts, plan.proposals)
            verified = rows * drafts
        elif drafts != plan.proposals:
            return
        predicted = self.prior.time(rows, rows + verified, sum(plan.contexts), drafts, plan.is_read)
        time = math.log(seconds / predicted)
        size = self._sizes.setdefault(rows.bit_length(), _Size(time))
        size.add(_kind(rows, verified), time)

    def wants_trial(self, rows: int, drafts: int, drafting: int) -> bool:
        """Return whether a number of drafts should be tried because the time of such steps is unknown."""
        size, kind = self._sizes.get(rows.bit_length()), _kind(rows, self._verified(rows, drafts, drafting))
        return size is not None and size.trials.get(kind, 0) < MOST_TRIALS and not size.is_known(kind)

    def note_trial(self, rows: int, drafts: int, drafting: int) -> None:
        """Count a trial."""
        trials, kind = self._sizes[rows.bit_length()].trials, _kind(rows, self._verified(rows, drafts, drafting))
        trials[kind] = trials.get(kind, 0) + 1

    def wants_check(self, rows: int, gain: float) -> bool:
        """Return whether steps without drafts should be measured: steps are measured, but not enough of these.

        gain: the factor by which drafts raise the rate of tokens, as far as known.
        """
        size = self._sizes.get(rows.bit_length())
        return size is not None and size.wants_check(gain)

    def _verified(self, rows: int, drafts: int, drafting: int) -> int:
        """Return how many drafts a step computes, with padding."""
        return drafts * (rows if self.prior.padded else drafting)

    def _factor(self, rows: int, kind: float) -> float:
        """Return the measured time of a kind of step, relative to `StepCost`, up to a factor common to all kinds."""
        size = self._nearest(rows)
        return 1.0 if size is None else math.exp(size.offset(kind))

    def _nearest(self, rows: int) -> _Size | None:
        """Return the measurements of the most similar batch size. None if there are none."""
        bits = rows.bit_length()
        if bits in self._sizes or not self._sizes:
            return self._sizes.get(bits)
        return self._sizes[min(self._sizes, key=lambda other: abs(other - bits))]


def _kind(rows: int, verified: int) -> float:
    """Return the kind of a step. verified: the drafts of all rows."""
    return max(round(4 * verified / rows), 1) / 4 if verified else 0.0


def _midmean(values: Seq[float]) -> float:
    """Return the mean of values without the largest and the smallest quarter of them."""
    quarter = len(values) // 4
    middle = sorted(values)[quarter : len(values) - quarter]
    return sum(middle) / len(middle)

"""Decides how many drafts each decoding row verifies in a step, and how many the proposer makes.

A draft becomes a token if it and all drafts before it are accepted. `Acceptance` estimates how many tokens a number of
drafts brings to a row. `MeasuredCost` estimates the time of the step that verifies them. `Drafting` chooses the number
of drafts that brings most tokens per time for the whole batch. All rows verify this number, except rows to which it
brings too little: these verify none. If no number of drafts pays, the proposer does not run at all.

Some rows verify one draft more than pays now and then, so that a change of their text is noticed. Such probes take a
small share of the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from aengine.scheduling.acceptance import Acceptance
from aengine.scheduling.sequence import Sequence
from aengine.step_cost import FREE, MeasuredCost, StepCost
from aengine.step_plan import StepPlan

FIRST_RATE = 0.6  # expected rate of acceptance before anything was observed
CHOOSE_EVERY = 8  # steps between two choices for the same batch
PAYS = 1.02  # drafts must raise the rate by this factor: what the proposer adds to prompts is not counted
STAYS = 1.005  # another number of drafts must be better than the present one by this factor
TRIED = 1.25  # a number of drafts of unknown cost is tried if it would be the best with a rate better by this factor
EXCLUDES = 1.03  # rows are only excluded if the rate is better by this factor
# Arguments of `Acceptance`: for a sequence, and for all sequences together.
ROW_WINDOW, ROW_WEIGHT, OVERALL_WINDOW, OVERALL_WEIGHT = 64, 8.0, 256, 2.0
LEAST_SHARE = 0.5  # rows are excluded if they gain less than this share of the mean gain of the other rows
PROBE_SHARE = 0.006  # share of the time that probes may take
PROBE_EVERY = 32  # steps between two probes, or more
PROBE_ROWS = 8  # rows of a step that verify more drafts than pay
PROBE_STEPS = 8  # steps of a probe if the proposer did not run before; sequences that begin meanwhile have good drafts
LEARNING_STEPS, LEARNING_PROBES = 64, 8  # first steps, in which the proposer runs, and steps between their probes
WAITED = 64  # steps for which the proposer still reads if steps no longer have room for the drafts that pay
CHECK_STEPS = 5  # steps without drafts that measure their time


@dataclass(frozen=True, slots=True)
class _Choice:
    drafts: int  # of each row that verifies some
    least: float  # a row verifies drafts if they bring at least so many tokens to it
    gain: float  # factor of the rate of tokens, compared to no drafts
    is_read: bool  # whether the proposer runs
    probe_every: float  # steps


@dataclass(slots=True)
class DraftRoom:
    """The tokens and pages of a step that drafts may use. Drafts leave enough for decodes and prompts."""

    tokens: int
    pages: int  # negative: no row gets drafts

    def drafts(self, rows: int, page_size: int) -> int:
        """Return about how many drafts there is room for. The last page of a row is half empty on average."""
        return 0 if self.pages < 0 else max(min(self.tokens, self.pages * page_size + rows * page_size // 2), 0)


class Drafting:
    """Chooses the number of drafts of each row, and the number of drafts to propose for the next step.

    For each step, call `begin`, then `wanted` for each row. When the step is committed, call `observe` for
    each row with drafts, and `observe_time`.
    """

    def __init__(self, most: int, cost: StepCost) -> None:
        """most: the most drafts of a row. 0: no step verifies drafts."""
        self.most = most
        self._cost = MeasuredCost(cost)
        # Of all sequences without a gap, and of all with one.
        self._overall = Acceptance([FIRST_RATE] * most, OVERALL_WINDOW, OVERALL_WEIGHT)
        self._overall_gap = Acceptance([FIRST_RATE] * most, OVERALL_WINDOW, OVERALL_WEIGHT)
        self._choice = _Choice(most, 0.0, 1.0, True, math.inf)
        self._step = 0
        self._is_fixed = cost is FREE
        self._chosen_until = 0  # the step from which on the choice is made again
        self._rows = self._drafts_room = 0  # for which the choice was made
        self._waits_until = 0  # the step until which the proposer reads although steps have too little room
        self._probe_at: float = LEARNING_PROBES  # the step of the next probe
        self._probe_until = 0  # the first step after the newest probe
        # Rows that may still verify more drafts than pay in this step, and those among them without a gap.
        self._probes_left = self._fresh_left = 0
        self._round = 0  # of probes; each row takes part once in a round
        self._check_until = 0  # until this step no row drafts, to measure the time of such steps

    def begin(self, running: Seq[Sequence], plan: StepPlan, room: int) -> None:
        """Begin to plan a step. Sets the number of drafts that it makes for the next one.

        room: about how many drafts all sequences together may verify in the step. The next one has as much, usually.
        """
        if self._is_fixed:
            plan.proposals = self.most
            return
        self._step = step = self._step + 1
        rows = len(running)
        room = min(room, rows * self.most)
        if (
            step >= self._chosen_until
            or 8 * abs(rows - self._rows) > self._rows
            or 8 * abs(room - self._drafts_room) > self._drafts_room
        ):
            self._choose(running, room)
        choice = self._choice
        if choice.drafts and step >= self._check_until + CHOOSE_EVERY and self._cost.wants_check(rows, choice.gain):
            self._check_until = step + CHECK_STEPS
        if self._probes_left:
            self._round += 1  # all rows took part
        self._probes_left = self._fresh_left = PROBE_ROWS if step <= self._probe_until else 0
        if step >= self._probe_at:
            self._probe_at = step + choice.probe_every
            self._probe_until = step + (1 if choice.is_read else PROBE_STEPS)
        if step < self._probe_until:
            plan.proposals, plan.is_read = self._probe_of(choice.drafts), True
        elif step < self._check_until:
            plan.proposals, plan.is_read = 0, True
        else:
            plan.proposals, plan.is_read = choice.drafts, choice.is_read

    def wanted(self, sequence: Sequence) -> int:
        """Return how many drafts a sequence should verify in this step.

        The drafts must exist: the sequence's last launched step proposed them. All of them may be accepted, and no
        token may be drawn after the sequence's last one.
        """
        if not sequence.proposed or not _may_draft(sequence):
            return 0
        acceptance, choice = sequence.acceptance or self._expected(sequence), self._choice
        drafts = choice.drafts
        if drafts and acceptance.gains[drafts - 1] < choice.least:
            drafts = 0
        if self._step < self._check_until:
            drafts = 0
        elif self._probes_left and drafts < sequence.proposed and self._takes_probe(sequence):
            drafts = self._probe_of(choice.drafts)
        left = sequence.max_output - len(sequence.output) - sequence.pending - 1
        return max(0, min(drafts, sequence.proposed, left))

    def observe(self, sequence: Sequence, drafts: int, accepted: int) -> None:
        """Note how many drafts of a committed step were accepted."""
        expected = self._expected(sequence)
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance(expected.rates, ROW_WINDOW, ROW_WEIGHT)
        sequence.acceptance.observe(drafts, accepted)
        expected.observe(drafts, accepted)

    def observe_time(self, plan: StepPlan, seconds: float) -> None:
        """Note how long a committed step took."""
        self._cost.observe(plan, seconds)

    def _expected(self, sequence: Sequence) -> Acceptance:
        """Return the acceptance of all sequences like this one."""
        return self._overall_gap if sequence.has_gap else self._overall

    def _takes_probe(self, sequence: Sequence) -> bool:
        """Return whether a sequence takes part in a probe in this step. Each sequence does in turn.

        If the proposer runs for probes only, some sequences without a gap take part in each step of the probe, because
        only they have good drafts.
        """
        if self._fresh_left and not sequence.has_gap and not self._choice.is_read:
            self._fresh_left -= 1
            return True
        if sequence.acceptance is not None:
            if sequence.acceptance.probed >= self._round:
                return False
            sequence.acceptance.probed = self._round
        self._probes_left -= 1
        return True

    def _probe_of(self, drafts: int) -> int:
        """Return how many drafts a probe verifies. drafts: how many pay."""
        return min(drafts + 1, self.most)

    def _estimate(self, sequence: Sequence) -> Acceptance:
        """Return the newest estimate of how often a sequence's drafts are accepted."""
        expected = self._expected(sequence)
        if sequence.acceptance is None:
            return expected
        sequence.acceptance.estimate(expected.rates, ROW_WEIGHT)
        return sequence.acceptance

    def _choose(self, running: Seq[Sequence], room: int) -> None:
        """Choose the number of drafts that brings most tokens per time. room: as for `begin`."""
        rows, context = max(len(running), 1), sum(sequence.launched for sequence in running)
        self._chosen_until, self._rows, self._drafts_room = self._step + CHOOSE_EVERY, rows, room
        cost, overall, before = self._cost, self._overall, self._choice
        overall.estimate_alone(FIRST_RATE, OVERALL_WEIGHT)
        self._overall_gap.estimate(overall.rates, OVERALL_WEIGHT)
        estimates = [self._estimate(sequence) for sequence in running if _may_draft(sequence)]
        if not running:
            estimates.append(overall)  # of the sequence whose prompt the step begins
            room = self.most
        time = cost.time(rows, context, 0, 0, False)
        without = rows / time
        best = PAYS * without
        drafts, least, drafting = 0, math.inf, 0
        for count in range(1, self.most + 1):
            is_trial = count * len(estimates) <= room and cost.wants_trial(rows, count, len(estimates))
            gains = sorted((estimate.gains[count - 1] for estimate in estimates), reverse=True)
            sums = list(itertools.accumulate(gains))
            for some in _some_counts(len(gains)):
                is_all = some == len(gains)
                if (is_trial or cost.prior.padded) and not is_all:
                    break  # leaving rows out saves nothing, or it is not known what it saves
                if count * some > room:
                    continue
                taken = cost.time(rows, context, count, some, True)
                rate = (rows + sums[some - 1]) / taken
                rate *= (TRIED if is_trial else 1) * (1 if is_all else 1 / EXCLUDES)
                if rate * (STAYS if count == before.drafts else 1) > best:
                    best, drafts, drafting, time = rate, count, some, taken
                    least = 0.0 if is_all else LEAST_SHARE * sums[some - 1] / some
        if cost.wants_trial(rows, drafts, drafting):
            cost.note_trial(rows, drafts, drafting)
        if drafts:
            self._waits_until = self._step + WAITED
        waits = before.is_read and self._step < self._waits_until and room < rows * self.most
        is_read = bool(estimates) and (drafts > 0 or cost.prior.reading == 0 or self._step < LEARNING_STEPS or waits)
        every: float = self._probe_every(rows, context, time, drafts, is_read)
        if not estimates or (drafts == self.most and drafting == len(estimates)):
            every = math.inf
        elif room < drafting * drafts + min(rows, PROBE_ROWS):
            every = math.inf  # there is no room for probes
        elif self._step < LEARNING_STEPS:
            every = LEARNING_PROBES
        self._choice = _Choice(drafts, least, best / without if drafts else 1.0, is_read, every)
        self._probe_at = math.inf if math.isinf(every) else min(self._probe_at, self._step + every)

    def _probe_every(self, rows: int, context: int, time: float, drafts: int, is_read: bool) -> float:
        """Return the number of steps between two probes. time: of a step with so many drafts."""
        probed = self._cost.time(rows, context, self._probe_of(drafts), min(rows, PROBE_ROWS), True)
        extra = probed - time
        steps = 1 if is_read else PROBE_STEPS
        return max(PROBE_EVERY, steps * extra / (PROBE_SHARE * time))


def _may_draft(sequence: Sequence) -> bool:
    """Return whether a sequence may verify drafts now."""
    return sequence.speculates and (sequence.grammar is None or sequence.grammar.takes_drafts)


def _some_counts(most: int) -> Iterator[int]:
    """Return some numbers from `most` down to 1."""
    count = most
    while count:
        yield count
        count -= -(-count // 4)

"""The results of one step with drafts, applied to its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.batch import Counters
from aengine.scheduling.flight import Flight, commit_computed, commit_draws
from aengine.scheduling.sequence import Phase, Sequence, Update
from aengine.step_plan import RowLogprobs, StepPlan, StepResult
from tests.scheduling.stepping import Seen


def decoding(row: int, drafts: int, *, max_output: int = 100, stop_ids: tuple[int, ...] = ()) -> Sequence:
    """Return a sequence of ten prompt tokens and one drawn one, which is in flight with its drafts."""
    sequence = Sequence(
        prompt=packed(range(10)),
        params=SamplingParams(),
        seed=0,
        stop_ids=stop_ids,
        max_total=10 + max_output,
        rank=(0.0, row),
        output=[50],
        phase=Phase.RUNNING,
        row=row,
    )
    sequence.computed = 10
    sequence.launched = 11 + drafts
    sequence.pending = 1 + drafts
    return sequence


def flight_of(sequences: Seq[Sequence]) -> Flight:
    """Return a step in which each sequence verifies all of its pending drafts."""
    drafts = [sequence.pending - 1 for sequence in sequences]
    rows = [sequence.row for sequence in sequences]
    plan = StepPlan(step=0, new_rows=[], new_pages=[], decode=rows, prefill=[], page_copies=[])
    plan.drafts = drafts if any(drafts) else []
    return Flight(plan, list(sequences))


def result_of(*kept: list[int], finite: Seq[bool] = (), logprobs: bool = False) -> StepResult:
    """Return a result in which each row keeps the given tokens."""
    token_ids = [token_id for tokens in kept for token_id in tokens]
    return StepResult(
        token_ids,
        list(finite) or [True] * len(kept),
        [RowLogprobs(-float(token_id), [], []) for token_id in token_ids] if logprobs else None,
        counts=[len(tokens) for tokens in kept],
    )


class Ended:
    """Ends sequences, and remembers which."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []

    def __call__(self, sequence: Sequence) -> None:
        sequence.phase = Phase.FINISHED
        self.sequences.append(sequence)


def commit(flight: Flight, result: StepResult, counters: Counters | None = None) -> tuple[list[Update], list[Sequence]]:
    """Commit a step. Returns the updates and the sequences that ended."""
    ended, counters = Ended(), Counters() if counters is None else counters
    commit_computed(flight, result, counters, lambda sequence, drafts, accepted: None)
    return commit_draws(flight, result, counters, ended), ended.sequences


def test_it_reports_what_each_row_with_drafts_accepted() -> None:
    sequences = [decoding(0, drafts=3), decoding(1, drafts=0), decoding(2, drafts=2)]
    sequences[2].phase = Phase.FINISHED
    observed: list[tuple[Sequence, int, int]] = []
    plan = StepPlan(0, [], [], [0, 1, 2], [], [], drafts=[3, 0, 2])
    result = StepResult([60, 61, 62, 63], [True] * 3, None, counts=[2, 1, 1])
    commit_computed(Flight(plan, sequences), result, Counters(), lambda *args: observed.append(args))
    assert observed == [(sequences[0], 3, 1)]


@pytest.mark.parametrize("accepted", range(4))
def test_a_row_counts_the_tokens_that_it_keeps(accepted: int) -> None:
    sequence = decoding(0, drafts=3)
    updates, _ = commit(flight_of([sequence]), result_of(list(range(60, 61 + accepted))))
    assert sequence.output == [50, *range(60, 61 + accepted)]
    assert (sequence.computed, sequence.launched, sequence.pending) == (11 + accepted, 11 + accepted, 0)
    assert [update.token_ids for update in updates] == [tuple(range(60, 61 + accepted))]


def test_a_later_step_in_flight_stays_launched_and_pending() -> None:
    sequence = decoding(0, drafts=3)
    flight = flight_of([sequence])
    sequence.launched += 1 + 2
    sequence.pending += 1 + 2
    commit(flight, result_of([60, 61]))
    assert (sequence.computed, sequence.launched, sequence.pending) == (12, 12 + 3, 3)


def test_tokens_and_logprobs_are_those_of_each_row_in_turn() -> None:
    sequences = [decoding(0, 0), decoding(1, 1), decoding(2, 3)]
    updates, _ = commit(flight_of(sequences), result_of([60], [70], [80, 81, 82], logprobs=True))
    expected = [(0, (60,)), (1, (70,)), (2, (80, 81, 82))]
    assert [(update.sequence.row, update.token_ids) for update in updates] == expected
    for update in updates:
        assert update.logprobs is not None
        assert tuple(row and -row.sampled for row in update.logprobs) == update.token_ids
    assert [sequence.computed for sequence in sequences] == [11, 11, 13]


def test_without_counts_each_row_has_one_token() -> None:
    sequences = [decoding(0, 0), decoding(1, 0)]
    updates, _ = commit(flight_of(sequences), StepResult([60, 70], [True, True], None))
    assert [sequence.output for sequence in sequences] == [[50, 60], [50, 70]]
    assert [sequence.pending for sequence in sequences] == [0, 0]
    assert len(updates) == 2


def test_a_stop_token_is_the_last_one_and_the_tokens_after_it_are_dropped() -> None:
    sequence, other = decoding(0, 3, stop_ids=(61,)), decoding(1, 3)
    updates, ended = commit(flight_of([sequence, other]), result_of([60, 61, 62, 63], [70, 71]))
    assert [(update.token_ids, update.finish_reason) for update in updates] == [((60, 61), "stop"), ((70, 71), None)]
    assert (sequence.output, other.output) == ([50, 60, 61], [50, 70, 71])
    assert ended == [sequence]
    assert (sequence.pending, sequence.computed) == (0, 12)  # the stop token's keys and values do not count


def test_the_length_ends_a_sequence_in_the_middle_of_a_step() -> None:
    """No plan has so many drafts, but nothing depends on it."""
    sequence = decoding(0, 3, max_output=3)
    updates, ended = commit(flight_of([sequence]), result_of([60, 61, 62, 63]))
    assert sequence.output == [50, 60, 61]
    assert [(update.token_ids, update.finish_reason) for update in updates] == [((60, 61), "length")]
    assert ended == [sequence]


def test_tokens_of_a_sequence_that_has_ended_are_dropped() -> None:
    sequence, other = decoding(0, 2), decoding(1, 0)
    flight = flight_of([other, sequence])
    sequence.phase = Phase.FINISHED
    updates, ended = commit(flight, result_of([70], [60, 61]))
    assert [update.token_ids for update in updates] == [(70,)]
    assert (sequence.output, sequence.computed, sequence.pending, sequence.launched) == ([50], 10, 0, 12)
    assert ended == []


def test_a_row_that_is_not_finite_ends_with_one_update() -> None:
    sequence, other = decoding(0, 2), decoding(1, 2)
    updates, ended = commit(flight_of([sequence, other]), result_of([0, 0], [70, 71], finite=[False, True]))
    assert [(update.token_ids, update.finite) for update in updates] == [((), False), ((70, 71), True)]
    assert ended == [sequence]
    assert (sequence.output, sequence.pending, sequence.cacheable) == ([50], 0, False)


def test_a_preempted_sequence_keeps_its_tokens() -> None:
    sequence = decoding(0, 2)
    sequence.phase = Phase.PREEMPTED
    commit(flight_of([sequence]), result_of([60, 61]))
    assert (sequence.output, sequence.computed, sequence.pending) == ([50, 60, 61], 12, 0)


def test_a_grammar_accepts_every_token_that_is_kept() -> None:
    sequence = decoding(0, 3, stop_ids=(62,))
    sequence.grammar = seen = Seen()
    commit(flight_of([sequence]), result_of([60, 61, 62, 63]))
    assert seen.tokens == [60, 61, 62]


def test_counters_see_each_row_with_drafts_once() -> None:
    counters = Counters()
    gone, broken = decoding(3, 2), decoding(4, 2)
    rows = [decoding(0, 0), decoding(1, 2), decoding(2, 3, stop_ids=(81,)), gone, broken]
    flight = flight_of(rows)
    gone.phase = Phase.FINISHED
    result = result_of([60], [70], [80, 81, 82, 83], [90, 91], [0], finite=[True, True, True, True, False])
    commit(flight, result, counters)
    assert (counters.verified, counters.drafted, counters.accepted) == (2, 5, 3)
    assert counters.accepted_by_position == [1, 1, 1]
    assert counters.generated_tokens == 4

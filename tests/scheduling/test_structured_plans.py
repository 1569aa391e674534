"""Sequences with a grammar: their steps are marked, and the grammar accepts exactly the committed output."""

from __future__ import annotations

import random

import pytest

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import StepPlan, StepResult
from tests.scheduling.stepping import Seen, Stepper, prompt_of


def drawing(stepper: Stepper, plan: StepPlan) -> list[Sequence]:
    """Return the sequences with a grammar that draw in a step, in the order of their draws."""
    return [sequence for sequence, _ in stepper.scheduler.structured_draws(plan)]


def test_only_steps_in_which_a_grammar_draws_are_structured() -> None:
    stepper = Stepper(max_step_tokens=8)
    (free,) = stepper.request(prompt_of(4), 30)
    first = stepper.schedule()
    bound = stepper.add(prompt_of(12, first=1), 3, grammar=True)
    chunk, last, decode = stepper.schedule(), stepper.schedule(), stepper.schedule()
    assert first is not None
    assert chunk is not None
    assert last is not None
    assert decode is not None
    assert [plan.structured for plan in (first, chunk, last, decode)] == [False, False, True, True]
    assert drawing(stepper, chunk) == []
    assert drawing(stepper, last) == [bound]
    stepper.run()
    assert len(free.output) == 30
    stepper.check_outputs()


def test_a_sequence_with_a_late_mask_skips_steps_and_others_do_not() -> None:
    stepper = Stepper()
    bound = stepper.add(prompt_of(5, first=1), 4, grammar=True)
    free = stepper.add(prompt_of(5, first=2), 9)
    for _ in range(2):
        stepper.schedule()
        stepper.commit()
    assert isinstance(bound.grammar, Seen)
    bound.grammar.late = True
    before = len(bound.output)
    for _ in range(3):
        plan = stepper.schedule()
        assert plan is not None
        assert plan.decode == [free.row]
        stepper.commit()
    assert len(bound.output) == before
    bound.grammar.late = False
    stepper.run()
    assert (len(bound.output), len(free.output)) == (4, 9)
    stepper.check_outputs()


def test_forks_stand_in_the_order_of_their_draws() -> None:
    stepper = Stepper()
    stepper.request(prompt_of(5), 9)
    stepper.schedule()
    family = stepper.request(prompt_of(6, first=1), 4, n=3, grammar=True)
    plan = stepper.schedule()
    assert plan is not None
    assert plan.sampled_rows[1:] == [sequence.row for sequence in family]
    assert drawing(stepper, plan) == family
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_grammar_sees_what_is_committed_whatever_happens(seed: int, lookahead: int) -> None:
    """Sequences are preempted, fork and queue; the mark is right at every step."""
    rng = random.Random(seed)
    stepper = Stepper(num_pages=14, page_size=4, max_rows=4, max_step_tokens=8, lookahead=lookahead, vocab=60)
    for number in range(8):
        prompt = prompt_of(rng.randint(1, 12), first=number)
        stepper.request(prompt, rng.randint(1, 20), n=rng.choice([1, 1, 3]), grammar=rng.random() < 0.5)
    while not stepper.scheduler.idle:
        plan = stepper.schedule()
        bound = [sequence for sequence in stepper.got if sequence.grammar is not None]
        if plan is not None:
            expected = [sequence for sequence in bound if sequence.row in plan.sampled_rows and sequence.row >= 0]
            assert plan.structured == bool(expected)
            assert {*drawing(stepper, plan)} == {*expected}
        if plan is None or len(stepper.in_flight) > lookahead:
            stepper.commit()
        stepper.scheduler.check_integrity()
        for sequence in bound:
            assert isinstance(sequence.grammar, Seen)
            assert sequence.grammar.tokens == sequence.output
    stepper.check_outputs()


def test_drafts_of_structured_draws_are_those_that_the_last_committed_draw_has_made() -> None:
    scheduler, bound, free = drafting()
    prefill = scheduler.schedule()
    assert prefill is not None
    assert (prefill.proposals, prefill.structured) == (2, True)
    first = scheduler.schedule()  # before the drafts are known
    assert first is not None
    assert (first.decode, first.drafts) == ([bound.row, free.row], [2, 2])
    scheduler.commit(prefill, StepResult([10, 20], [True] * 2, None, proposed=[[11, 12], [21, 22]]))
    assert scheduler.structured_draws(first) == [(bound, [11, 12])]
    second = scheduler.schedule()
    assert second is not None
    scheduler.commit(first, StepResult([11, 13, 20], [True] * 2, None, counts=[2, 1], proposed=[[14, 15], [23, 24]]))
    assert scheduler.structured_draws(second) == [(bound, [14, 15])]
    assert isinstance(bound.grammar, Seen)
    assert bound.grammar.tokens == bound.output == [10, 11, 13]


def test_a_sequence_without_time_for_masks_after_drafts_verifies_none() -> None:
    scheduler, bound, free = drafting()
    assert isinstance(bound.grammar, Seen)
    bound.grammar.takes_drafts = False
    prefill, decode = scheduler.schedule(), scheduler.schedule()
    assert prefill is not None
    assert decode is not None
    assert (decode.decode, decode.drafts) == ([bound.row, free.row], [0, 2])
    scheduler.commit(prefill, StepResult([10, 20], [True] * 2, None, proposed=[[11, 12], [21, 22]]))
    assert scheduler.structured_draws(decode) == [(bound, [])]


def drafting() -> tuple[Scheduler, Sequence, Sequence]:
    """Return a scheduler of steps with two drafts, and its two sequences, of which the first has a grammar."""
    scheduler = Scheduler(num_pages=100, page_size=16, max_rows=4, max_step_tokens=64, max_queue=9, most_drafts=2)
    sequences = [
        Sequence(
            prompt=packed(prompt_of(5, first=number)),
            params=SamplingParams(),
            seed=number,
            stop_ids=(),
            max_total=50,
            rank=(0.0, number),
            grammar=Seen() if number == 0 else None,
        )
        for number in range(2)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler, sequences[0], sequences[1]

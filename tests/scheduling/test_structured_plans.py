"""Sequences with a grammar: their steps are marked, and the grammar accepts exactly the committed output."""

from __future__ import annotations

import random

import pytest

from tests.scheduling.stepping import Seen, Stepper, prompt_of


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
    assert stepper.scheduler.structured_draws(chunk) == []
    assert stepper.scheduler.structured_draws(last) == [bound]
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
    assert stepper.scheduler.structured_draws(plan) == family
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
            drawing = [sequence for sequence in bound if sequence.row in plan.sampled_rows and sequence.row >= 0]
            assert plan.structured == bool(drawing)
            assert {*stepper.scheduler.structured_draws(plan)} == {*drawing}
        if plan is None or len(stepper.in_flight) > lookahead:
            stepper.commit()
        stepper.scheduler.check_integrity()
        for sequence in bound:
            assert isinstance(sequence.grammar, Seen)
            assert sequence.grammar.tokens == sequence.output
    stepper.check_outputs()

"""Sequences with a grammar: their steps say so, and the grammar sees the committed output, no more and no less."""

from __future__ import annotations

import random

import pytest

from aengine.scheduling.sequence import Sequence
from tests.scheduling.stepping import Stepper, prompt_of


class Seen:
    """In place of a grammar: the tokens it was told of, and whether its next mask is late."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.late = False

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)


def bind(sequence: Sequence) -> Sequence:
    sequence.grammar = Seen()  # type: ignore[assignment]
    return sequence


def test_only_steps_in_which_a_grammar_draws_are_structured() -> None:
    stepper = Stepper(max_step_tokens=8)
    (free,) = stepper.request(prompt_of(4), 30)
    first = stepper.schedule()
    (bound,) = map(bind, stepper.request(prompt_of(12, first=1), 3))
    chunk, last, decode = stepper.schedule(), stepper.schedule(), stepper.schedule()
    assert first is not None
    assert chunk is not None
    assert last is not None
    assert decode is not None
    assert [plan.structured for plan in (first, chunk, last, decode)] == [False, False, True, True]
    assert stepper.scheduler.structured(chunk) == []
    assert stepper.scheduler.structured(last) == [bound]
    stepper.run()
    assert free.output_len == 30
    stepper.check_outputs()


def test_who_waits_for_a_mask_sits_out_steps_and_nobody_else_does() -> None:
    stepper = Stepper()
    (free,) = stepper.request(prompt_of(4), 30)
    (bound,) = map(bind, stepper.request(prompt_of(5, first=1), 4))
    stepper.schedule()
    stepper.commit()
    assert bound.output_len == 1
    bound.grammar.late = True  # type: ignore[union-attr, misc]
    before = free.output_len
    for _ in range(5):
        plan = stepper.schedule()
        assert plan is not None
        assert not plan.structured
        assert plan.decode == [free.row]
        stepper.commit()
    assert (bound.output_len, free.output_len) == (1, before + 5)
    bound.grammar.late = False  # type: ignore[union-attr, misc]
    stepper.run()
    assert (bound.output_len, free.output_len) == (4, 30)
    stepper.check_outputs()


def test_forks_stand_in_the_order_of_their_draws() -> None:
    stepper = Stepper()
    stepper.request(prompt_of(5), 9)
    stepper.schedule()
    family = [bind(sequence) for sequence in stepper.request(prompt_of(6, first=1), 4, n=3)]
    plan = stepper.schedule()
    assert plan is not None
    assert plan.sampled_rows[1:] == [sequence.row for sequence in family]
    assert stepper.scheduler.structured(plan) == family
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_grammar_sees_what_is_committed_whatever_happens(seed: int, lookahead: int) -> None:
    """Small pools preempt, siblings fork or queue up; the flag is right at every step."""
    rng = random.Random(seed)
    stepper = Stepper(num_pages=14, page_size=4, max_rows=4, max_step_tokens=8, lookahead=lookahead, vocab=60)
    bound: list[Sequence] = []
    for number in range(8):
        family = stepper.request(
            prompt_of(rng.randint(1, 12), first=number), rng.randint(1, 20), n=rng.choice([1, 1, 3])
        )
        bound += [bind(sequence) for sequence in family if rng.random() < 0.5]
    while not stepper.scheduler.idle:
        plan = stepper.schedule()
        if plan is not None:
            drawing = [sequence for sequence in bound if sequence.row in plan.sampled_rows and sequence.row >= 0]
            assert plan.structured == bool(drawing)
            assert {*stepper.scheduler.structured(plan)} == {*drawing}
        if plan is None or len(stepper.in_flight) > lookahead:
            stepper.commit()
        stepper.scheduler.check_integrity()
        for sequence in bound:
            assert sequence.grammar.tokens == sequence.output  # type: ignore[union-attr]
    stepper.check_outputs()

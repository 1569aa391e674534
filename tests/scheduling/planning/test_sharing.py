"""Decoding rows with a common prefix: a hint for the device, which may read it once for all of them."""

from __future__ import annotations

import pytest

from aengine.scheduling.planning import sharing
from aengine.step_plan import StepPlan
from tests.scheduling.stepping import Stepper, prompt_of


@pytest.fixture(autouse=True)
def every_run_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_SAVED", 1)


def runs(plan: StepPlan | None) -> list[tuple[list[int], int]]:
    """Return the shared runs of a plan as (rows, tokens)."""
    assert plan is not None
    return [(sorted(plan.decode[place] for place in run.members), run.tokens) for run in plan.shared]


def decoding(stepper: Stepper) -> StepPlan | None:
    """Return the first plan without prefill after all prefills are committed."""
    plan = stepper.step()
    while plan is None or plan.prefill:
        plan = stepper.step()
    return stepper.step()


def test_requests_that_hit_the_same_prefix_share_it() -> None:
    stepper = Stepper(page_size=4)
    stepper.add(prompt_of(9), max_tokens=1)
    stepper.run()
    for first in range(3):
        stepper.add([*prompt_of(9), *prompt_of(5, 1 + first)])
    stepper.add(prompt_of(20, first=7))  # has nothing in common with them
    assert runs(decoding(stepper)) == [([0, 1, 2], 8)]
    stepper.run()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_choices_share_their_prompt_as_soon_as_it_is_cached(lookahead: int) -> None:
    stepper = Stepper(page_size=4, lookahead=lookahead)
    stepper.request(prompt_of(10), n=4)
    assert runs(decoding(stepper)) == [([0, 1, 2, 3], 8)]
    stepper.run()


def test_where_groups_nest_what_saves_more_is_shared() -> None:
    stepper = Stepper(page_size=4)
    short, long = prompt_of(4), prompt_of(20)
    stepper.add(long, max_tokens=1)
    stepper.run()
    for first in range(2):
        stepper.add([*long, *prompt_of(3, 1 + first)])
    stepper.add([*short, *prompt_of(9, first=5)])
    # Two rows share 20 tokens, which saves one reading of 20. All three share 4, which saves two readings of 4.
    assert runs(decoding(stepper)) == [([0, 1], 20)]
    stepper.run()


def test_a_row_is_in_one_run_only() -> None:
    stepper = Stepper(page_size=4)
    long = prompt_of(20)
    for prompt in (long, [*long, *prompt_of(4, first=1)]):
        stepper.add(prompt, max_tokens=1)
        stepper.run()
    for first in range(2):
        stepper.add([*long, *prompt_of(4, first=1), *prompt_of(3, 2 + first)])
    stepper.add([*long, *prompt_of(3, first=4)])
    # All three share 20 tokens, which saves two readings of 20. Two share 24, which saves one reading of 24.
    assert runs(decoding(stepper)) == [([0, 1, 2], 20)]
    stepper.run()


def test_a_sequence_that_is_gone_shares_no_longer() -> None:
    stepper = Stepper(page_size=4, max_rows=3)
    family = stepper.request(prompt_of(8), max_tokens=12, n=3)
    assert runs(decoding(stepper)) == [([0, 1, 2], 8)]
    leader, sibling, other = family
    gone, left = sibling.row, (leader.row, other.row)
    stepper.abort(sibling)
    stepper.add(prompt_of(8, first=1), max_tokens=12)  # takes over the row, and has nothing in common with them
    plans = stepper.run()
    assert any(gone in plan.decode for plan in plans)
    assert {tuple(rows) for plan in plans for rows, _ in runs(plan)} == {left}


def test_a_run_that_saves_too_little_is_not_worth_its_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "LEAST_SAVED", 25)
    for n, shared in ((4, []), (5, [([0, 1, 2, 3, 4], 8)])):  # (n - 1) * 8 tokens saved
        stepper = Stepper(page_size=4)
        stepper.request(prompt_of(10), n=n)
        assert runs(decoding(stepper)) == shared
        stepper.run()

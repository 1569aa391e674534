"""With drafts, snapshots of outputs are found as without. A snapshot with another state is found by the fake device."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduling.addons.test_snapshots import run, stepper
from tests.scheduling.stepping import Stepper, prompt_of

GRAIN = 8
ACCEPTS = [[0], [3], [1], [0, 3], [2, 0, 0], [3, 3, 1, 0, 2]]


def drafting(accepts: list[int], **knobs: object) -> Stepper:
    """Return a stepper that keeps states of prompts only at the end. Rows have three drafts in each step."""
    return stepper(prompt_grain=800, most_drafts=3, accepts=accepts, **knobs)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("accepts", ACCEPTS, ids=str)
def test_the_next_turn_is_found_up_to_the_last_kept_state(accepts: list[int], lookahead: int) -> None:
    """A state is kept after every 8 tokens, but not at a prompt's end. An answer's last token is never computed."""
    for length, max_tokens in itertools.product((15, 16), (1, 2, 3, 8, 9, 10, 14, 17, 18)):
        kept = [end for end in range(0, length + max_tokens, GRAIN) if end != length]
        steps = drafting(accepts, lookahead=lookahead)
        sequence = run(steps, prompt_of(length), max_tokens)
        again = run(steps, [*prompt_of(length), *sequence.output, 7, 7], 2)
        assert again.cached == kept[-1]


@pytest.mark.parametrize("accepts", ACCEPTS, ids=str)
def test_a_step_saves_one_state_of_a_row_which_is_after_its_prompt(accepts: list[int]) -> None:
    steps = drafting(accepts)
    steps.request(prompt_of(30), 60)
    saves = [plan.state_saves for plan in steps.run()]
    assert max(map(len, saves)) == 1
    positions = [tokens for save in saves for _, tokens, _ in save]
    assert positions == sorted(positions)
    assert set(positions) == set(range(32, 90, GRAIN))


@pytest.mark.parametrize(
    ("accepts", "other", "length", "max_tokens"),
    [([0], 6, 4, 3), ([1], 6, 5, 3), ([0, 3], 7, 6, 2), ([2, 0, 0], 5, 6, 4)],
)
def test_without_a_free_slot_a_position_is_skipped_for_good(
    accepts: list[int], other: int, length: int, max_tokens: int
) -> None:
    """Another row holds the only slot and ends just after this one has passed a position. It is too late to save."""
    steps = drafting(accepts, count=1)
    steps.request(prompt_of(other, first=1), max_tokens, arrival=0)
    (sequence,) = steps.request(prompt_of(length, first=2), 9, arrival=1)
    steps.run()
    assert run(steps, [*prompt_of(length, first=2), *sequence.output, 7, 7]).cached == 0


@pytest.mark.parametrize("accepts", ACCEPTS, ids=str)
def test_a_choice_that_forks_saves_no_state_within_its_prompt(accepts: list[int]) -> None:
    steps = drafting(accepts)
    steps.request(prompt_of(20), 10, n=3)
    steps.run()
    steps.check_outputs()
    assert run(steps, prompt_of(14)).cached == 0
    assert run(steps, prompt_of(20)).cached == 16


def test_a_preempted_sequence_continues_from_what_it_saved() -> None:
    """The pool holds one of two long sequences."""
    for accepts in ACCEPTS:
        steps = drafting(accepts, num_pages=22)
        for first in (1, 2):
            steps.request(prompt_of(9, first=first), 60, arrival=first)
        steps.run()
        steps.check_outputs()
        assert steps.scheduler.counters.preemptions > 0

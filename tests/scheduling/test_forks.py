"""n > 1: the choices of one request share their prompt."""

from __future__ import annotations

import pytest

from aengine.scheduling.sequence import Phase
from tests.scheduling.stepping import Stepper, prompt_of


def test_n_choices_draw_from_one_row_of_logits_and_share_full_pages() -> None:
    stepper = Stepper(page_size=4)
    leader, *siblings = stepper.request(prompt_of(10), n=3)
    plan = stepper.schedule()
    assert plan is not None
    (chunk,) = plan.prefill
    assert list(chunk.forks) == [sibling.row for sibling in siblings]
    assert plan.sampled_rows == [leader.row, *chunk.forks]
    assert [sibling.pages[:2] for sibling in siblings] == [leader.pages[:2]] * 2
    assert plan.page_copies == [(leader.pages[2], sibling.pages[2]) for sibling in siblings]
    stepper.run()
    assert stepper.device.tokens == 10 + 3 * 7  # the prompt went through the model once
    assert len({tuple(sequence.output) for sequence in (leader, *siblings)}) == 3
    stepper.check_outputs()


def test_a_prompt_of_whole_pages_needs_no_copies() -> None:
    stepper = Stepper(page_size=4)
    stepper.request(prompt_of(8), n=3)
    plan = stepper.schedule()
    assert plan is not None
    assert plan.page_copies == []
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_siblings_without_a_row_queue_up(prefix_cache: bool) -> None:
    stepper = Stepper(page_size=4, max_rows=2, prefix_cache=prefix_cache)
    family = stepper.request(prompt_of(10), n=4)
    stepper.schedule()
    assert [sequence.phase for sequence in family] == [Phase.RUNNING] * 2 + [Phase.WAITING] * 2
    assert stepper.scheduler.waiting == 2
    stepper.run()
    stepper.check_outputs()


def test_siblings_without_a_page_queue_up() -> None:
    stepper = Stepper(num_pages=4, page_size=4)
    family = stepper.request(prompt_of(10), 2, n=2)
    stepper.schedule()
    assert family[1].phase is Phase.WAITING
    stepper.run()
    stepper.check_outputs()


def test_a_prompt_is_counted_once_for_all_choices_that_fork() -> None:
    stepper = Stepper(page_size=4)
    stepper.request(prompt_of(10), n=3)
    stepper.run()
    counters = stepper.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens, counters.generated_tokens) == (10, 0, 24)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("ends_first", [0, 1])
@pytest.mark.parametrize("turns", range(7))
def test_choices_end_one_by_one_in_every_phase(ends_first: int, turns: int, prefix_cache: bool) -> None:
    stepper = Stepper(page_size=4, max_step_tokens=8, prefix_cache=prefix_cache)
    family = stepper.request(prompt_of(18), max_tokens=5, n=3)  # three chunks
    for _ in range(turns):
        stepper.step()
    stepper.abort(family[ends_first])
    stepper.scheduler.check_integrity()
    stepper.run()
    stepper.check_outputs()
    lengths = [sequence.output_len for sequence in family if sequence is not family[ends_first]]
    assert lengths == [5, 5]


def test_siblings_outlive_a_leader_that_is_aborted_in_the_queue() -> None:
    stepper = Stepper()
    leader, *siblings = stepper.request(prompt_of(10), n=3)
    stepper.abort(leader)
    assert stepper.scheduler.waiting == 1  # the next sibling leads
    stepper.run()
    assert [sibling.output_len for sibling in siblings] == [8, 8]
    stepper.check_outputs()


def test_a_request_aborted_as_a_whole_leaves_nothing_in_the_queue() -> None:
    stepper = Stepper()
    family = stepper.request(prompt_of(10), n=3)
    for sequence in family:
        stepper.abort(sequence)
    assert stepper.scheduler.idle
    stepper.scheduler.check_integrity()


def test_a_sibling_aborted_before_the_fork_never_gets_a_row() -> None:
    stepper = Stepper()
    leader, aborted, other = stepper.request(prompt_of(10), n=3)
    stepper.abort(aborted)
    plan = stepper.schedule()
    assert plan is not None
    assert plan.sampled_rows == [leader.row, other.row]
    stepper.run()
    stepper.check_outputs()


def test_a_sibling_preempted_before_its_first_token_is_known_resumes_alone() -> None:
    stepper = Stepper(num_pages=6, page_size=4)
    stepper.request(prompt_of(11), max_tokens=6, n=3)
    stepper.run()
    assert stepper.scheduler.counters.preemptions > 0
    stepper.check_outputs()

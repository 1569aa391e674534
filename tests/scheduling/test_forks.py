"""n > 1: the choices of one request share their prompt."""

from __future__ import annotations

import pytest

from aengine.scheduling.sequence import Phase
from aengine.step_plan import StepResult
from tests.scheduling.stepping import Stepper, prompt_of


def test_n_choices_draw_from_one_row_of_logits_and_share_full_pages() -> None:
    stepper = Stepper(page_size=4)
    family = stepper.request(prompt_of(10), n=3)
    plan = stepper.schedule()
    assert plan is not None
    leader, *siblings = family
    (chunk,) = plan.prefill
    assert list(chunk.forks) == [sibling.row for sibling in siblings]
    assert plan.sampled_rows == [leader.row, *chunk.forks]
    assert [sibling.pages[:2] for sibling in siblings] == [leader.pages[:2]] * 2
    assert plan.page_copies == [(leader.pages[2], sibling.pages[2]) for sibling in siblings]
    assert plan.new_pages == [(sibling.row, 2, sibling.pages[2]) for sibling in siblings]
    stepper.run()
    assert stepper.device.tokens == 10 + 3 * 7  # the prompt went through the model once
    assert len({tuple(sequence.output) for sequence in family}) == 3
    stepper.check_outputs()


def test_choices_are_made_when_they_fork_and_share_their_prompt() -> None:
    stepper = Stepper(page_size=4)
    family = stepper.request(prompt_of(10), n=3)
    assert len(family) == 1
    assert stepper.scheduler.waiting == 3
    stepper.schedule()
    assert len({id(sequence.prompt) for sequence in family}) == 1
    assert stepper.scheduler.waiting == 0
    stepper.run()
    stepper.check_outputs()


def test_a_row_that_forks_says_whose_copy_it_is_and_brings_nothing_else() -> None:
    stepper = Stepper(page_size=4)
    family = stepper.request(prompt_of(9), n=3)
    plan = stepper.schedule()
    assert plan is not None
    first, *rest = plan.new_rows
    leader, *siblings = family
    assert (first.copy_of, first.pages) == (None, leader.pages)
    assert [(new.row, new.copy_of, new.pages, new.length, new.seed) for new in rest] == [
        (sibling.row, leader.row, [], 9, sibling.seed) for sibling in siblings
    ]
    stepper.run()
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
def test_of_siblings_without_a_row_one_queues_up_and_the_others_fork_from_it(prefix_cache: bool) -> None:
    stepper = Stepper(page_size=4, max_rows=2, prefix_cache=prefix_cache)
    family = stepper.request(prompt_of(10), n=4)
    stepper.schedule()
    assert [sequence.phase for sequence in family] == [Phase.RUNNING] * 2 + [Phase.WAITING]
    assert stepper.scheduler.waiting == 2
    stepper.run()
    stepper.check_outputs()
    again = 2 if prefix_cache else 10  # the tokens after the last full page, or all of them
    assert stepper.device.tokens == 10 + again + 4 * 7


def test_siblings_without_a_page_queue_up() -> None:
    stepper = Stepper(num_pages=4, page_size=4)
    family = stepper.request(prompt_of(10), 2, n=2)
    stepper.schedule()
    assert family[1].phase is Phase.WAITING
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_prompt_is_counted_once_for_all_choices(rows: int) -> None:
    """Both if they fork and if they have to wait for a row."""
    stepper = Stepper(page_size=4, max_rows=rows)
    stepper.request(prompt_of(10), n=3)
    stepper.run()
    counters = stepper.scheduler.counters
    assert (counters.prompt_tokens, counters.cached_tokens, counters.generated_tokens) == (10, 0, 24)


@pytest.mark.parametrize("prompt", [17, 20])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("first_to_go", [0, 1, 2])
def test_what_choices_share_is_held_until_the_last_of_them_leaves(
    first_to_go: int, prefix_cache: bool, prompt: int
) -> None:
    stepper = Stepper(page_size=4, prefix_cache=prefix_cache)
    family = stepper.request(prompt_of(prompt), max_tokens=9, n=3)
    stepper.step()
    stepper.step()
    free = stepper.scheduler.memory.available
    rest = [sequence for sequence in family if sequence is not family[first_to_go]]
    stepper.abort(family[first_to_go])
    stepper.scheduler.check_integrity()
    while stepper.in_flight:
        stepper.commit()
    assert stepper.scheduler.memory.available <= free + 1  # only its own page becomes available
    for sequence in rest:
        stepper.step()
        stepper.abort(sequence)
        stepper.scheduler.check_integrity()
    stepper.run()
    stepper.check_outputs()
    memory = stepper.scheduler.memory
    assert memory.available == memory.usable_pages


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("ends_first", [0, 1])
@pytest.mark.parametrize("turns", range(3, 7))
def test_choices_end_one_by_one_in_every_phase(ends_first: int, turns: int, prefix_cache: bool) -> None:
    stepper = Stepper(page_size=4, max_step_tokens=8, prefix_cache=prefix_cache)
    family = stepper.request(prompt_of(18), max_tokens=5, n=3)  # three chunks
    for _ in range(turns):
        stepper.step()
    stepper.abort(family[ends_first])
    stepper.scheduler.check_integrity()
    stepper.run()
    stepper.check_outputs()
    lengths = [len(sequence.output) for sequence in family if sequence is not family[ends_first]]
    assert lengths == [5, 5]


@pytest.mark.parametrize("turns", range(3))
def test_choices_that_are_not_made_yet_end_with_the_one_that_they_would_fork_from(turns: int) -> None:
    """In the queue, and between the chunks of the prompt."""
    stepper = Stepper(page_size=4, max_step_tokens=8)
    (leader,) = stepper.request(prompt_of(18), n=3)
    for _ in range(turns):
        stepper.step()
    stepper.abort(leader)
    assert stepper.scheduler.waiting == 0
    stepper.run()
    stepper.scheduler.check_integrity()
    assert stepper.scheduler.idle


def test_a_leader_preempted_between_two_chunks_keeps_its_choices() -> None:
    stepper = Stepper(num_pages=9, page_size=4, max_step_tokens=8)
    older = stepper.add(prompt_of(7, first=1), max_tokens=20)
    stepper.step()
    family = stepper.request(prompt_of(20), max_tokens=3, n=3)
    stepper.run()
    assert older.phase is Phase.FINISHED
    assert [len(sequence.output) for sequence in family] == [3, 3, 3]
    stepper.check_outputs()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_failing_step_ends_the_choices_that_it_carried_and_their_unmade_siblings(rows: int) -> None:
    stepper = Stepper(page_size=4, max_rows=rows)
    family = stepper.request(prompt_of(10), n=3)
    stepper.schedule()
    assert stepper.fail() == family[:rows]
    for sequence in family[rows:]:  # the queued choice was not in the failed step
        assert sequence.phase is Phase.WAITING
        stepper.abort(sequence)
    stepper.scheduler.check_integrity()
    assert stepper.scheduler.idle


def test_choices_of_a_prompt_whose_first_chunk_is_not_finite_all_end() -> None:
    """They fork in the step that is launched before the chunk's values are known."""
    stepper = Stepper(page_size=4, max_step_tokens=8)
    family = stepper.request(prompt_of(16), n=3)
    stepper.schedule()
    stepper.schedule()
    assert len(family) == 3
    (update,) = stepper.commit(broken={family[0].row})
    assert (update.sequence, update.finite) == (family[0], False)
    assert {update.finish_reason for update in stepper.commit()} == {"error"}
    assert stepper.scheduler.idle
    assert stepper.scheduler.memory.tree.cached_pages == 0
    stepper.scheduler.check_integrity()


def test_forks_cache_nothing_of_a_chunk_that_is_not_finite() -> None:
    """In a model with a short attention window, their own values may be finite again."""
    stepper = Stepper(page_size=4, max_step_tokens=8)
    family = stepper.request(prompt_of(16), n=3)
    scheduler = stepper.scheduler
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    (update,) = scheduler.commit(first, StepResult([], [], None, finite_chunks=[False]))
    assert update.sequence is family[0]
    scheduler.commit(second, StepResult([1, 2, 3], [True] * 3, None))
    for sequence in family:
        scheduler.abort(sequence)
    assert scheduler.idle
    assert scheduler.memory.tree.cached_pages == 0
    scheduler.check_integrity()


def test_a_sibling_preempted_before_its_first_token_is_known_resumes_alone() -> None:
    stepper = Stepper(num_pages=6, page_size=4)
    stepper.request(prompt_of(11), max_tokens=6, n=3)
    stepper.run()
    assert stepper.scheduler.counters.preemptions > 0
    stepper.check_outputs()

"""Rows that verify drafts: what they write to, keep and give back, whatever happens while drafts are in flight."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aengine.scheduling.sequence import Phase, Sequence
from tests.scheduling.fake_drafts import REFUSED
from tests.scheduling.fake_model import naive_output
from tests.scheduling.stepping import VOCAB, Stepper, prompt_of

ACCEPTS = [(0,), (5,), (0, 4, 1, 5)]


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_same_tokens_as_without_drafts(page_size: int, accepts: tuple[int, ...], lookahead: int) -> None:
    stepper = Stepper(page_size=page_size, most_drafts=5, accepts=accepts, lookahead=lookahead)
    for first, max_tokens in enumerate((1, 2, 3, 7, 16, 33)):
        stepper.add(prompt_of(5, first), max_tokens)
    stepper.run()
    stepper.check_outputs()


def test_accepted_drafts_save_steps() -> None:
    def steps(accepted: int) -> int:
        stepper = Stepper(most_drafts=4, accepts=[accepted], lookahead=0)
        stepper.add(prompt_of(5), max_tokens=51)
        return len(stepper.run())

    assert [steps(accepted) for accepted in (0, 1, 4)] == [51, 26, 11]


@pytest.mark.parametrize("place", range(4))
def test_nothing_follows_a_stop_token_among_accepted_drafts(place: int) -> None:
    """The step keeps a token before the stop token and one after it; the request does not."""
    prompt = prompt_of(5)
    stop = naive_output(prompt, 0, (), len(prompt) + 2 + place, VOCAB)[-1]
    stepper = Stepper(page_size=1, most_drafts=3, accepts=[3])
    sequence = stepper.add(prompt, max_tokens=30, stop_ids=(stop,))
    stepper.run()
    assert sequence.output == stepper.expected(sequence)
    assert sequence.output[-1] == stop
    assert stepper.got[sequence].finish_reason == "stop"
    assert stepper.scheduler.counters.generated_tokens == 2 + place
    assert stepper.scheduler.memory.tree.cached_pages == 5 + 1 + place  # not the stop token, though it was computed
    stepper.check_outputs()


def test_a_stop_string_that_cuts_accepted_drafts_leaves_none_of_them_in_the_cache() -> None:
    stepper = Stepper(page_size=1, most_drafts=4, accepts=[4])
    sequence = stepper.add(prompt_of(5), max_tokens=60)
    while len(sequence.output) < 11:
        stepper.step()
    stepper.finish(sequence, 7)
    stepper.run()
    assert stepper.got[sequence].token_ids == stepper.expected(sequence)[:7]
    assert stepper.scheduler.memory.tree.cached_pages == 5 + 6


@pytest.mark.parametrize("accepts", ACCEPTS)
def test_refused_drafts_are_never_cached(accepts: tuple[int, ...]) -> None:
    """The device compares the pages that enter the tree with their tokens, and those that a row reads."""
    stepper = Stepper(page_size=4, most_drafts=5, accepts=accepts)
    chat = prompt_of(6)
    for turn in range(5):
        sequence = stepper.add(chat, max_tokens=11)
        stepper.run()
        if turn:
            assert sequence.cached == (len(chat) - 2 - 1) // 4 * 4
        chat = [*chat, *sequence.output, *prompt_of(2, 10 + turn)]
    stepper.check_outputs()


def test_the_page_of_an_output_that_ends_before_refused_drafts_is_not_cached() -> None:
    stepper = Stepper(page_size=4, most_drafts=3, accepts=[0], lookahead=0)
    sequence = stepper.add(prompt_of(5), max_tokens=20)
    for _ in range(3):
        stepper.step()
    assert REFUSED in stepper.device.slots  # in the second page, with tokens 4, 5 and 6
    stepper.abort(sequence)
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages == 1


END: dict[str, Callable[[Stepper, Sequence], None]] = {
    "abort": lambda stepper, sequence: stepper.abort(sequence),
    "stop string": lambda stepper, sequence: stepper.finish(sequence, 1),
}


@pytest.mark.parametrize("end", END)
@pytest.mark.parametrize("accepts", ACCEPTS)
def test_pages_that_drafts_in_flight_may_write_to_are_freed_when_these_land(accepts: tuple[int, ...], end: str) -> None:
    stepper = Stepper(page_size=2, max_rows=1, most_drafts=5, accepts=accepts, prefix_cache=False)
    free = stepper.scheduler.memory.allocator.free
    sequence = stepper.add(prompt_of(5), max_tokens=40)
    for _ in range(3):
        stepper.schedule()
    stepper.commit()
    END[end](stepper, sequence)
    held = len(sequence.pages)
    assert held >= -(-(5 + 2 * 6) // 2)
    for _ in range(2):
        assert stepper.scheduler.memory.allocator.free == free - held
        assert stepper.schedule() is None
        stepper.commit()
    assert stepper.scheduler.memory.allocator.free == free
    assert stepper.scheduler.idle
    stepper.check_outputs()


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("accepts", ACCEPTS)
def test_abort_in_every_phase_gives_everything_back(accepts: tuple[int, ...], steps: int) -> None:
    stepper = Stepper(num_pages=12, page_size=2, max_step_tokens=12, most_drafts=3, accepts=accepts)
    older = stepper.add(prompt_of(6), max_tokens=9)
    aborted = stepper.add(prompt_of(8, first=1), max_tokens=13)
    for _ in range(steps):
        stepper.step()
    stepper.abort(aborted)
    stepper.scheduler.check_integrity()
    stepper.run()
    assert older.output == stepper.expected(older)
    stepper.check_outputs()


# ---- preemption -------------------------------------------------------------------------------------------


def preempting(accepts: tuple[int, ...], stop_ids: tuple[int, ...] = ()) -> tuple[Stepper, Sequence]:
    """Return a victim that is preempted while its drafts are in flight, because all free pages are gone."""
    stepper = Stepper(page_size=2, most_drafts=2, accepts=accepts, prefix_cache=False)
    stepper.add(prompt_of(6), max_tokens=20)
    victim = stepper.add(VICTIM, max_tokens=11, stop_ids=stop_ids)
    stepper.schedule()
    assert stepper.schedule().drafts == [2, 2]  # type: ignore[union-attr]
    allocator = stepper.scheduler.memory.allocator
    taken = allocator.take(allocator.free)
    while victim.phase is Phase.RUNNING:
        stepper.schedule()
    for page in taken:
        allocator.release(page)
    return stepper, victim


VICTIM = prompt_of(6, first=1)


@pytest.mark.parametrize("accepts", ACCEPTS)
def test_tokens_in_flight_of_a_preemption_victim_are_committed_before_it_re_enters_the_queue(
    accepts: tuple[int, ...],
) -> None:
    stepper, victim = preempting(accepts)
    later = len(stepper.in_flight) - 2  # steps of one token each
    assert (victim.phase, stepper.scheduler.waiting) == (Phase.PREEMPTED, 0)
    while stepper.in_flight:
        stepper.commit()
    assert victim.phase is Phase.WAITING
    assert len(victim.output) == 1 + (1 + min(accepts[1 % len(accepts)], 2)) + later
    assert (victim.launched, victim.computed, victim.pending, victim.proposed) == (0, 0, 0, 0)
    stepper.run()
    stepper.check_outputs()


def test_a_preemption_victim_may_end_with_a_draft_in_flight() -> None:
    stop_ids = (naive_output(VICTIM, 0, (), len(VICTIM) + 3, VOCAB)[-1],)
    stepper, victim = preempting((2,), stop_ids)
    while stepper.in_flight:
        stepper.commit()
    assert stepper.got[victim].finish_reason == "stop"
    assert len(victim.output) == 3
    assert stepper.scheduler.waiting == 0
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_pool_for_one_and_a_half_serves_everyone(rows: int, accepts: tuple[int, ...]) -> None:
    stepper = Stepper(num_pages=13, page_size=4, max_rows=rows, most_drafts=5, accepts=accepts)
    for first in range(20):
        stepper.add(prompt_of(9 + first % 7, first), max_tokens=16)
    stepper.run(limit=3000)
    assert stepper.scheduler.counters.preemptions > 0
    stepper.check_outputs()


# ---- failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("place", [0, 1])
def test_a_step_with_drafts_that_fails_ends_its_requests_and_no_others(place: int, accepts: tuple[int, ...]) -> None:
    stepper = Stepper(page_size=2, max_rows=2, most_drafts=3, accepts=accepts)
    failing = [stepper.add(prompt_of(5, i), 30) for i in range(2)]
    others = [stepper.add(prompt_of(5, 2 + i), 30) for i in range(2)]
    for _ in range(2):
        stepper.step()
    stepper.schedule()
    assert len(stepper.in_flight) == 2
    assert any(stepper.in_flight[place].drafts)
    assert stepper.fail(place) == failing
    stepper.scheduler.check_integrity()
    stepper.run()
    assert all(sequence.pending == 0 for sequence in failing)
    assert all(stepper.got[sequence].finish_reason == "length" for sequence in others)
    stepper.check_outputs()


@pytest.mark.parametrize("accepts", ACCEPTS)
def test_drafts_of_a_step_given_up_with_its_predecessor_are_not_pending(accepts: tuple[int, ...]) -> None:
    """The victim of the failure starts over, with all of its tokens still to draw."""
    stepper = Stepper(most_drafts=3, accepts=accepts)
    bystander = stepper.add(prompt_of(6, 1), 9)
    stepper.schedule()
    failing = stepper.add(prompt_of(5), 9)
    plan = stepper.schedule()  # the bystander's drafts, and a prompt
    assert plan is not None
    assert plan.drafts == [3]
    stepper.scheduler.abort(failing)
    stepper.got[failing].finish_reason = "abort"
    stepper.fail(place=1)
    assert bystander.phase is Phase.FINISHED
    assert bystander.pending == 1  # the prompt's draw, in the step that did not fail
    stepper.commit()
    assert bystander.pending == 0
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("accepts", ACCEPTS)
def test_a_drafted_row_that_is_not_finite_fails_alone_and_leaves_nothing_in_the_tree(accepts: tuple[int, ...]) -> None:
    stepper = Stepper(page_size=2, most_drafts=3, accepts=accepts)
    bad, good = stepper.add(prompt_of(4), 30), stepper.add(prompt_of(4, 1), 30)
    stepper.schedule()
    stepper.schedule()
    stepper.commit()
    cached = stepper.scheduler.memory.tree.cached_pages
    stepper.schedule()
    updates = [update for update in stepper.commit(broken={bad.row}) if update.sequence is bad]
    assert [(update.token_ids, update.finite, update.finish_reason) for update in updates] == [((), False, "error")]
    stepper.commit()
    assert stepper.scheduler.memory.tree.cached_pages == cached
    stepper.run()
    assert good.output == stepper.expected(good)
    stepper.check_outputs()


# ---- forks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accepts", ACCEPTS)
@pytest.mark.parametrize("prompt", [7, 8])
def test_choices_verify_the_drafts_of_the_step_in_which_they_forked(prompt: int, accepts: tuple[int, ...]) -> None:
    stepper = Stepper(page_size=4, most_drafts=3, accepts=accepts)
    family = stepper.request(prompt_of(prompt), 12, n=3)
    stepper.schedule()
    plan = stepper.schedule()
    assert plan is not None
    assert (plan.decode, plan.drafts) == ([sequence.row for sequence in family], [3, 3, 3])
    stepper.run()
    assert len({tuple(sequence.output) for sequence in family}) == 3
    stepper.check_outputs()


def test_choices_of_a_request_that_does_not_speculate_do_not_speculate() -> None:
    stepper = Stepper(most_drafts=3)
    stepper.request(prompt_of(7), 12, n=3, speculates=False)
    assert not any(plan.drafts for plan in stepper.run())
    stepper.check_outputs()


# ---- statistics -------------------------------------------------------------------------------------------


def test_drafts_are_counted_by_position() -> None:
    stepper = Stepper(most_drafts=3, accepts=[3, 0, 2, 1], lookahead=0)
    stepper.add(prompt_of(5), max_tokens=11)  # one from the prompt, then 4, 1, 3 and 2
    stepper.run()
    counters = stepper.scheduler.counters
    # Only one draft was left for the last step, after which there is room for one more token.
    assert (counters.verified, counters.drafted, counters.accepted) == (4, 3 + 3 + 3 + 1, 3 + 0 + 2 + 1)
    assert counters.accepted_by_position == [3, 2, 1]
    assert counters.generated_tokens == 11


def test_drafts_after_a_stop_token_count_as_accepted() -> None:
    """Counters measure the proposer."""
    prompt = prompt_of(5)
    stop = naive_output(prompt, 0, (), len(prompt) + 3, VOCAB)[-1]
    stepper = Stepper(most_drafts=4, accepts=[4], lookahead=0)
    stepper.add(prompt, max_tokens=30, stop_ids=(stop,))
    stepper.run()
    counters = stepper.scheduler.counters
    assert (counters.verified, counters.drafted, counters.accepted) == (1, 4, 4)


def test_drafts_of_a_request_that_has_ended_count_for_nothing() -> None:
    stepper = Stepper(most_drafts=2, accepts=[2])
    sequence = stepper.add(prompt_of(5), max_tokens=30)
    stepper.schedule()
    stepper.schedule()
    stepper.abort(sequence)
    stepper.run()
    assert stepper.scheduler.counters.verified == 0

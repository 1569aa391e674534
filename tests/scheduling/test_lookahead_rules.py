"""The rules that make it safe to launch a step before the tokens of the last one are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aengine.scheduling.sequence import Phase, Sequence
from aengine.step_plan import StepPlan
from tests.scheduling.fake_model import naive_output
from tests.scheduling.stepping import VOCAB, Stepper, prompt_of


def stop_after(prompt: list[int], tokens: int) -> tuple[int, ...]:
    """Return the stop ids that end a prompt's output after `tokens` tokens."""
    return (naive_output(prompt, 0, (), len(prompt) + tokens, VOCAB)[-1],)


def fill(plan: StepPlan | None) -> StepPlan:
    """Return a plan that must exist."""
    assert plan is not None
    return plan


def test_page_0_is_never_handed_out() -> None:
    stepper = Stepper(num_pages=5, page_size=4)
    stepper.add(prompt_of(13), max_tokens=4)  # 16 of its tokens need K and V: every page there is
    plans = stepper.run()
    handed_out = {page for plan in plans for new in plan.new_rows for page in new.pages}
    handed_out |= {page for plan in plans for _, _, page in plan.new_pages}
    assert handed_out == {1, 2, 3, 4}


def test_pages_of_the_next_step_are_reserved_before_its_launch() -> None:
    stepper = Stepper(page_size=4)
    sequence = stepper.add(prompt_of(4), max_tokens=5)
    stepper.schedule()
    ahead = fill(stepper.schedule())  # feeds a token that is still unknown here, at position 4
    assert ahead.decode == [sequence.row]
    assert ahead.new_pages == [(sequence.row, 1, sequence.pages[1])]
    assert stepper.scheduler.memory.allocator.held(sequence.pages[1])


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_request_that_ends_by_length_never_overruns(max_tokens: int, lookahead: int) -> None:
    stepper = Stepper(lookahead=lookahead)
    sequence = stepper.add(prompt_of(5), max_tokens)
    stepper.run()
    assert stepper.got[sequence].finish_reason == "length"
    assert len(stepper.got[sequence].token_ids) == max_tokens
    assert stepper.device.tokens == 5 + max_tokens - 1  # the last one drawn is never fed


def test_a_stop_token_overruns_by_one_token_that_is_dropped() -> None:
    stepper = Stepper(page_size=1)  # so that pages in the tree are tokens
    prompt = prompt_of(5)
    sequence = stepper.add(prompt, max_tokens=20, stop_ids=stop_after(prompt, 4))
    stepper.run()
    got = stepper.got[sequence]
    assert got.finish_reason == "stop"
    assert got.token_ids == stepper.expected(sequence)
    assert len(got.token_ids) == 4
    assert stepper.device.tokens == 5 + 3 + 1  # the prompt, the tokens before the stop token, and the overrun
    assert stepper.scheduler.counters.generated_tokens == 4
    assert stepper.scheduler.memory.tree.cached_pages == 5 + 3  # the stop token was fed, but only by the overrun


def test_a_stop_string_overruns_by_one_token_that_is_dropped() -> None:
    stepper = Stepper(page_size=1)
    sequence = stepper.add(prompt_of(5), max_tokens=20)
    for _ in range(5):
        stepper.step()  # four draws are committed, the fifth is in flight
    stepper.finish(sequence, 4)
    stepper.run()
    assert sequence.output == stepper.expected(sequence)[:4]
    assert stepper.device.tokens == 5 + 4
    assert stepper.scheduler.memory.tree.cached_pages == 5 + 3


def test_a_stop_string_found_late_cuts_what_was_drawn_since() -> None:
    stepper = Stepper(page_size=1)
    sequence = stepper.add(prompt_of(5), max_tokens=20)
    for _ in range(6):
        stepper.step()
    stepper.finish(sequence, 2)  # of the five tokens committed
    stepper.run()
    assert sequence.output == stepper.expected(sequence)[:2]
    assert stepper.scheduler.memory.tree.cached_pages == 5 + 1  # without the last token, as in any other case


END: dict[str, Callable[[Stepper, Sequence], None]] = {
    "stop token": lambda stepper, sequence: None,  # ends by itself
    "stop string": lambda stepper, sequence: stepper.finish(sequence, 2),
    "abort": lambda stepper, sequence: stepper.abort(sequence),
}


@pytest.mark.parametrize("end", END)
def test_pages_and_rows_are_released_at_the_commit_of_the_last_launched_step_that_names_them(end: str) -> None:
    stepper = Stepper(page_size=4, max_rows=1, prefix_cache=False)
    free = stepper.scheduler.memory.allocator.free
    prompt = prompt_of(5)
    sequence = stepper.add(prompt, max_tokens=20, stop_ids=stop_after(prompt, 2) if end == "stop token" else ())
    successor = stepper.add(prompt_of(3, first=1), max_tokens=1)
    stepper.schedule()
    stepper.schedule()
    stepper.commit()
    stepper.schedule()
    stepper.commit()
    END[end](stepper, sequence)  # one step that names it is still in flight
    assert sequence.phase is Phase.FINISHED
    assert stepper.scheduler.running == 1
    assert stepper.scheduler.memory.allocator.free == free - 2
    assert stepper.schedule() is None  # its row is not given to the next request
    stepper.commit()
    assert stepper.scheduler.running == 0
    assert stepper.scheduler.memory.allocator.free == free
    assert [new.tokens for new in fill(stepper.schedule()).new_rows] == [successor.prompt]
    stepper.run()


def test_a_request_aborted_between_two_steps_is_released_at_once() -> None:
    stepper = Stepper(page_size=4, prefix_cache=False)
    free = stepper.scheduler.memory.allocator.free
    sequence = stepper.add(prompt_of(5))
    stepper.schedule()
    stepper.commit()
    stepper.abort(sequence)
    assert stepper.scheduler.idle
    assert stepper.scheduler.memory.allocator.free == free


def preempting(stop_ids: tuple[int, ...] = ()) -> tuple[Stepper, Sequence, Sequence]:
    """An older and a younger sequence. Five pages; from the fourth step on both of them would need six."""
    stepper = Stepper(num_pages=6, page_size=4)
    older = stepper.add(prompt_of(6), max_tokens=9)
    return stepper, older, stepper.add(VICTIM, max_tokens=8, stop_ids=stop_ids)


VICTIM = prompt_of(8, first=1)


def test_the_token_in_flight_of_a_preemption_victim_is_committed_before_it_re_enters_the_queue() -> None:
    stepper, older, victim = preempting()
    for _ in range(3):
        stepper.step()
    assert (len(older.output), len(victim.output)) == (2, 2)
    assert stepper.schedule() is None  # the older one waits for this step, which frees a page
    assert victim.phase is Phase.PREEMPTED
    assert victim.row >= 0
    assert stepper.scheduler.waiting == 0
    stepper.commit()  # the third step, with the victim's token
    assert len(victim.output) == 3
    assert victim.phase is Phase.WAITING
    assert stepper.scheduler.waiting == 1
    stepper.run()
    assert stepper.scheduler.counters.preemptions == 1
    stepper.check_outputs()


def test_a_preemption_victim_may_end_with_its_token_in_flight() -> None:
    stepper, _, victim = preempting(stop_after(VICTIM, 3))
    for _ in range(3):
        stepper.step()
    stepper.schedule()
    assert victim.phase is Phase.PREEMPTED
    stepper.commit()
    assert stepper.got[victim].finish_reason == "stop"
    assert stepper.scheduler.waiting == 0
    stepper.run()
    stepper.check_outputs()


def test_full_prompt_pages_enter_the_tree_at_the_commit_of_each_chunk() -> None:
    stepper = Stepper(page_size=4, max_rows=2, max_step_tokens=16)
    first = stepper.add(prompt_of(22))
    stepper.schedule()
    assert stepper.scheduler.memory.tree.cached_pages == 0  # not before the commit
    stepper.commit()
    assert stepper.scheduler.memory.tree.cached_pages == 4
    second = stepper.add(prompt_of(22))
    plan = fill(stepper.schedule())  # the rest of the first prompt, and the second one in the same step
    assert plan.new_rows[0].length == 16
    assert plan.new_rows[0].pages[:4] == first.pages[:4]
    assert second.cached == 16
    stepper.run()
    stepper.check_outputs()


def test_pages_are_never_swapped_where_the_tree_already_holds_others() -> None:
    stepper = Stepper(page_size=4)
    memory = stepper.scheduler.memory
    first = stepper.add(prompt_of(8), seed=1)
    second = stepper.add(prompt_of(8), seed=2)  # the same prompt in the same step: both compute it
    stepper.schedule()
    tables = [list(first.pages), list(second.pages)]
    stepper.commit()
    assert memory.tree.cached_pages == 2
    assert [first.pages, second.pages] == tables
    assert first.admitted is not None
    assert second.admitted is not None
    assert set(second.pages) == second.admitted.private  # its copies stay private
    assert not first.admitted.private
    stepper.run()
    assert memory.allocator.free + memory.tree.cached_pages == memory.usable_pages  # and are freed with it
    stepper.check_outputs()


def test_nothing_from_a_failed_step_enters_the_tree() -> None:
    stepper = Stepper(page_size=4, max_rows=2, max_step_tokens=8)
    stepper.add(prompt_of(12))
    stepper.schedule()
    stepper.commit()
    assert stepper.scheduler.memory.tree.cached_pages == 2  # the first chunk was fine
    stepper.schedule()
    stepper.fail()
    assert stepper.scheduler.idle
    assert stepper.scheduler.memory.tree.cached_pages == 2


def test_nothing_from_a_step_given_up_with_its_predecessor_enters_the_tree() -> None:
    stepper = Stepper(page_size=4)
    stepper.add(prompt_of(8))
    stepper.schedule()
    late = stepper.request(prompt_of(9, first=1), n=3)
    stepper.schedule()  # carries the last chunk of the late request, and the siblings that fork from it
    stepper.fail()
    assert stepper.scheduler.memory.tree.cached_pages == 0
    assert [sequence.phase for sequence in late] == [Phase.WAITING] * 3
    stepper.run()
    stepper.check_outputs()


def test_a_failed_step_ends_its_own_requests_and_its_successors_start_over() -> None:
    stepper = Stepper()
    failing = [stepper.add(prompt_of(8)), stepper.add(prompt_of(9, first=1))]
    stepper.schedule()
    late = stepper.add(prompt_of(10, first=2))
    stepper.schedule()
    assert stepper.fail() == failing
    assert all(sequence.phase is Phase.FINISHED for sequence in failing)
    assert late.phase is Phase.WAITING
    stepper.run()
    assert len(stepper.got[late].token_ids) == 8
    stepper.check_outputs()


def test_a_step_that_fails_leaves_its_predecessor_in_flight_alone() -> None:
    stepper = Stepper()
    both = stepper.add(prompt_of(8))
    once = stepper.add(prompt_of(9, first=1), max_tokens=1)  # its only draw is in the first step
    stepper.schedule()
    stepper.schedule()
    assert stepper.fail(place=1) == [both]
    stepper.commit()
    assert stepper.got[once].finish_reason == "length"
    assert stepper.got[both].token_ids == []  # it ended before its token was known
    stepper.run()
    stepper.check_outputs()


def test_a_failed_step_takes_the_siblings_with_it_that_wait_for_its_prefill() -> None:
    stepper = Stepper(max_rows=2, max_step_tokens=8)
    family = stepper.request(prompt_of(12), n=3)
    stepper.schedule()
    assert stepper.fail() == family[:1]  # the others are not made yet
    assert stepper.scheduler.waiting == 0
    assert stepper.scheduler.idle


def test_a_row_that_is_not_finite_fails_alone_and_leaves_nothing_in_the_tree() -> None:
    stepper = Stepper(page_size=4)
    bad = stepper.add(prompt_of(8))
    good = stepper.add(prompt_of(8, first=1))
    stepper.schedule()
    stepper.schedule()
    updates = stepper.commit(broken={bad.row})
    assert [(update.sequence, update.finite, update.finish_reason) for update in updates] == [
        (bad, False, "error"),
        (good, True, None),
    ]
    stepper.commit()  # the last step that names it: now its pages are freed
    assert stepper.scheduler.memory.tree.cached_pages == 2  # the good one's
    retry = stepper.add(prompt_of(8))
    stepper.run()
    assert retry.cached == 0
    assert stepper.got[bad].token_ids == []
    stepper.check_outputs()


@pytest.mark.parametrize("chunk", range(3))
def test_a_chunk_that_is_not_finite_ends_its_request_and_leaves_nothing_in_the_tree(chunk: int) -> None:
    """Although it draws nothing. Earlier computed pages stay."""
    stepper = Stepper(page_size=4, max_rows=2, max_step_tokens=8)
    bad = stepper.add(prompt_of(21))
    for _ in range(chunk):
        stepper.schedule()
        stepper.commit()
    plan = stepper.schedule()
    assert plan is not None
    assert plan.sampled_rows == ([bad.row] if chunk == 2 else [])
    stepper.schedule()  # the next chunk, which attends to the broken one
    updates = stepper.commit(broken={bad.row})
    assert [(update.sequence, update.finite, update.finish_reason) for update in updates] == [(bad, False, "error")]
    while stepper.in_flight:
        assert stepper.commit() == []
    assert stepper.scheduler.memory.tree.cached_pages == 2 * chunk
    again = stepper.add(prompt_of(21))
    stepper.run()
    assert again.cached == 8 * chunk
    stepper.check_outputs()


def test_a_chunk_that_is_not_finite_does_not_affect_other_chunks_of_the_step() -> None:
    stepper = Stepper(page_size=4, max_step_tokens=24)
    decoding = stepper.add(prompt_of(5))
    stepper.step()
    good, bad = stepper.add(prompt_of(8, first=1)), stepper.add(prompt_of(40, first=2))
    stepper.step()
    stepper.commit(broken={bad.row})
    stepper.run()
    assert [stepper.got[one].finish_reason for one in (decoding, good, bad)] == ["length", "length", "error"]
    stepper.check_outputs()


def test_chunks_that_are_not_the_last_of_a_prompt_draw_nothing() -> None:
    stepper = Stepper(max_rows=1, max_step_tokens=10)
    sequence = stepper.add(prompt_of(25), max_tokens=3)
    plans = stepper.run()
    chunks = [chunk for plan in plans for chunk in plan.prefill]
    assert [(chunk.start, len(chunk.token_ids), chunk.samples) for chunk in chunks] == [
        (0, 10, False),
        (10, 10, False),
        (20, 5, True),
    ]
    assert [len(plan.sampled_rows) for plan in plans] == [0, 0, 1, 1, 1]
    assert sequence.output == stepper.expected(sequence)


def test_a_new_row_brings_every_token_known_so_that_penalties_can_be_rebuilt() -> None:
    stepper, _, victim = preempting()
    rows = []
    while victim.phase is not Phase.FINISHED:
        plan = stepper.step()
        rows += [(new.prompt_len, new.length, list(new.tokens)) for new in (plan.new_rows if plan else [])]
    # The second time, the first page is cached: its tokens are not computed, but they count.
    assert rows[1:] == [(8, 0, VICTIM), (8, 4, VICTIM + stepper.expected(victim)[:3])]


def test_a_plan_in_flight_does_not_change_with_its_requests() -> None:
    stepper, _, victim = preempting()
    while (plan := stepper.schedule()) is None or not (plan.new_rows and victim.output):
        if plan is None or len(stepper.in_flight) > 1:
            stepper.commit()
    (resumed,) = plan.new_rows
    stepper.finish(victim, 1)  # a stop string is found late, in the first token
    assert len(resumed.tokens) == 8 + 3
    stepper.run()  # the device reads the plan only now
    assert victim.output == stepper.expected(victim)[:1]


def test_steps_are_committed_in_the_order_of_their_launches() -> None:
    stepper = Stepper()
    stepper.add(prompt_of(4))
    first, second = fill(stepper.schedule()), fill(stepper.schedule())
    result = stepper.device.result(first)
    with pytest.raises(RuntimeError, match="not the oldest"):
        stepper.scheduler.commit(second, result)
    stepper.scheduler.commit(first, result)  # and nothing was lost by the mistake

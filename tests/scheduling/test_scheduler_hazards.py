"""Mistakes that engines of this kind have shipped."""

from __future__ import annotations

import pytest

from aengine.errors import ContextLengthError, QueueFullError
from aengine.scheduling.scheduler import Scheduler
from aengine.scheduling.sequence import Phase
from tests.scheduling.stepping import Stepper, prompt_of


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_the_last_token_is_neither_lost_nor_followed_by_another(lookahead: int) -> None:
    stepper = Stepper(lookahead=lookahead)
    by_length = stepper.add(prompt_of(5), max_tokens=6)
    last = stepper.expected(by_length)[3]
    by_stop = stepper.add(prompt_of(5), max_tokens=6, stop_ids=(last,))
    stepper.run()
    assert stepper.got[by_length].token_ids == stepper.expected(by_length)
    assert stepper.got[by_stop].token_ids[-1] == last
    assert by_stop.output == stepper.expected(by_stop)


@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
def test_max_tokens_is_not_off_by_one(max_tokens: int) -> None:
    stepper = Stepper()
    sequences = [stepper.add(prompt_of(length), max_tokens) for length in (1, 15, 16, 17)]
    stepper.run()
    assert [len(sequence.output) for sequence in sequences] == [max_tokens] * 4


def test_an_abort_does_not_free_pages_that_a_step_in_flight_still_writes() -> None:
    stepper = Stepper(num_pages=4, page_size=4, prefix_cache=False)
    sequence = stepper.add(prompt_of(10), max_tokens=3)
    stepper.schedule()
    stepper.abort(sequence)
    waiting = stepper.add(prompt_of(9, first=1), max_tokens=1)
    assert stepper.scheduler.memory.allocator.free == 0
    assert stepper.schedule() is None  # rows are free, but the pages are still being written
    stepper.commit()
    stepper.run()
    assert stepper.got[waiting].token_ids == stepper.expected(waiting)


def test_a_row_is_not_reused_while_a_step_in_flight_names_it() -> None:
    stepper = Stepper(max_rows=1)
    sequence = stepper.add(prompt_of(5))
    waiting = stepper.add(prompt_of(5, first=1))
    stepper.schedule()
    stepper.abort(sequence)
    assert stepper.schedule() is None
    stepper.commit()
    stepper.schedule()
    assert waiting.row == 0
    stepper.run()
    stepper.check_outputs()


def test_admission_counts_pages_not_tokens() -> None:
    stepper = Stepper(num_pages=5, page_size=16, max_rows=4)
    for first in range(4):  # 8 tokens in all, of 64: but one page each, and one to grow for each that runs already
        stepper.add(prompt_of(2, first), max_tokens=20)
    stepper.schedule()
    assert (stepper.scheduler.running, stepper.scheduler.waiting) == (2, 2)
    stepper.run()
    stepper.check_outputs()


def test_a_request_that_can_never_fit_is_refused_at_the_door() -> None:
    stepper = Stepper(num_pages=5, page_size=4)
    assert stepper.scheduler.capacity_tokens == 17  # the last token drawn is never fed
    with pytest.raises(
        ContextLengthError, match=r"^This model.s maximum context length is 17 tokens.* 10 tokens .* max_tokens is 8"
    ):
        stepper.add(prompt_of(10), max_tokens=8)
    assert stepper.scheduler.idle
    largest = stepper.add(prompt_of(10), max_tokens=7)
    stepper.run()
    assert stepper.got[largest].token_ids == stepper.expected(largest)


def test_a_small_request_does_not_starve_after_one_that_needs_the_whole_pool() -> None:
    stepper = Stepper(num_pages=5, page_size=4)
    stepper.add(prompt_of(4), max_tokens=3)
    stepper.add(prompt_of(16, first=1), max_tokens=1)  # has to wait for the first
    small = stepper.add(prompt_of(2, first=2), max_tokens=2)  # and this one for both: first come, first served
    stepper.run(limit=12)
    assert small.phase is Phase.FINISHED
    stepper.check_outputs()


def test_a_step_that_fails_does_not_stop_the_others() -> None:
    stepper = Stepper(max_rows=2)
    requests = [stepper.add(prompt_of(5, first)) for first in range(6)]
    stepper.step()
    stepper.step()
    failed = stepper.fail()
    assert failed == requests[:2]
    stepper.run()
    assert all(stepper.got[sequence].finish_reason == "length" for sequence in requests[2:])
    stepper.check_outputs()


@pytest.mark.parametrize("hit", [0, 4, 8])
def test_a_prefix_hit_is_aligned_with_what_follows_it(hit: int) -> None:
    stepper = Stepper(page_size=4)
    stepper.add(prompt_of(hit + 1), max_tokens=1)
    stepper.run()
    prompt = [*prompt_of(hit), *prompt_of(5, first=9)]
    sequence = stepper.add(prompt)
    (chunk,) = stepper.step().prefill  # type: ignore[union-attr]
    assert (chunk.start, list(chunk.token_ids)) == (hit, prompt[hit:])
    stepper.run()  # the device checks every token that it attends to
    assert sequence.cached == hit
    stepper.check_outputs()


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token() -> None:
    stepper = Stepper(page_size=4)
    stepper.add(prompt_of(12), max_tokens=1)
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages == 3
    again = stepper.add(prompt_of(12))
    (chunk,) = stepper.step().prefill  # type: ignore[union-attr]
    assert (chunk.start, len(chunk.token_ids), chunk.samples) == (8, 4, True)
    stepper.run()
    assert again.output == stepper.expected(again)


@pytest.mark.parametrize("lookahead", [0, 1])
def test_the_last_token_drawn_is_never_cached(lookahead: int) -> None:
    stepper = Stepper(page_size=4, lookahead=lookahead)
    sequence = stepper.add(prompt_of(5), max_tokens=3)  # 8 tokens, of which the K and V of 7 were written
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages == 1
    following = stepper.add([*sequence.prompt, *sequence.output, 5, 6])
    stepper.run()
    assert following.cached == 4
    stepper.check_outputs()


def test_the_queue_is_bounded() -> None:
    stepper = Stepper(max_queue=2)
    for first in range(2):
        stepper.add(prompt_of(4, first))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        stepper.add(prompt_of(4, first=2))
    stepper.schedule()
    stepper.add(prompt_of(4, first=2))
    stepper.run()
    stepper.check_outputs()


def test_every_choice_counts_towards_the_bound_of_the_queue() -> None:
    stepper = Stepper(max_queue=10, max_rows=4)
    stepper.request(prompt_of(4), n=6)
    with pytest.raises(QueueFullError, match="6 requests are waiting"):
        stepper.request(prompt_of(4, first=1), n=5)
    stepper.request(prompt_of(4, first=1), n=4)
    with pytest.raises(QueueFullError, match="10 requests are waiting"):
        stepper.add(prompt_of(4, first=2))
    stepper.schedule()
    assert stepper.scheduler.waiting == 6  # two choices of the first request, without rows, and the second request
    stepper.run()
    stepper.check_outputs()


def test_an_empty_queue_accepts_a_request_with_any_number_of_choices() -> None:
    stepper = Stepper(max_queue=3, max_rows=4)
    stepper.request(prompt_of(4), n=8)
    with pytest.raises(QueueFullError):
        stepper.add(prompt_of(4, first=1))
    stepper.run()
    stepper.check_outputs()


def test_a_step_that_could_not_carry_every_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a step of 4 tokens cannot carry 5 sequences"):
        Scheduler(num_pages=10, page_size=4, max_rows=5, max_step_tokens=4, max_queue=1)


@pytest.mark.parametrize("steps", range(8))
def test_abort_in_every_phase_gives_everything_back(steps: int) -> None:
    stepper = Stepper(num_pages=6, page_size=4, max_step_tokens=9)
    older = stepper.add(prompt_of(6), max_tokens=9)
    aborted = stepper.add(prompt_of(8, first=1), max_tokens=8)  # queued, in prefill, decoding, preempted, queued again
    for _ in range(steps):
        stepper.step()
    stepper.abort(aborted)
    stepper.abort(aborted)  # a second time changes nothing
    stepper.scheduler.check_integrity()
    stepper.run()
    assert older.output == stepper.expected(older)
    stepper.check_outputs()

"""Pooled prompts go through the scheduler as all others do, and end instead of drawing."""

from __future__ import annotations

import pytest

from aengine.errors import ContextLengthError, QueueFullError
from aengine.scheduling.sequence import Phase
from tests.scheduling.stepping import Kind, Stepper, prompt_of

KINDS: tuple[Kind, ...] = ("last", "mean")


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 3, 7, 16, 40, 100])
def test_a_prompt_is_pooled_whatever_its_chunks_are(kind: Kind, chunk: int, lookahead: int) -> None:
    stepper = Stepper(max_rows=1, max_step_tokens=chunk, lookahead=lookahead)
    (sequence,) = stepper.pool([prompt_of(40)], kind)
    plans = stepper.run()
    assert len(plans) == -(-40 // chunk)
    assert not any(plan.sampled_rows for plan in plans)
    assert [plan.pooled for plan in plans] == [kind == "mean"] * (len(plans) - 1) + [1]
    stepper.check_outputs()
    assert sequence.phase is Phase.FINISHED
    assert stepper.scheduler.counters.prompt_tokens == 40
    assert stepper.scheduler.counters.generated_tokens == 0


def test_decodes_continue_in_the_same_steps() -> None:
    stepper = Stepper(max_rows=4, max_step_tokens=16)
    writer = stepper.add(prompt_of(5), 30)
    for _ in range(3):
        stepper.step()
    stepper.pool([prompt_of(50, 1), prompt_of(20, 2)])
    plans = stepper.run()
    assert all(plan.decode for plan in plans if plan.prefill)
    stepper.check_outputs()
    assert len(stepper.got[writer].token_ids) == 30


def test_the_last_token_reads_a_cached_prefix_and_leaves_one() -> None:
    stepper = Stepper()
    stepper.pool([prompt_of(64)])
    stepper.run()
    again, longer = stepper.pool([prompt_of(64), prompt_of(80)])
    stepper.run()
    drawn = stepper.add(prompt_of(64))
    stepper.run()
    stepper.check_outputs()
    assert (again.cached, longer.cached, drawn.cached) == (48, 64, 48)


def test_a_mean_reads_every_token_and_leaves_them_to_others() -> None:
    stepper = Stepper()
    stepper.pool([prompt_of(64)])
    stepper.run()
    (mean,) = stepper.pool([prompt_of(64)], "mean")
    stepper.run()
    stepper.scheduler.flush_cache()
    stepper.device.flush()
    stepper.pool([prompt_of(64, 1)], "mean")
    stepper.run()
    (last,) = stepper.pool([prompt_of(64, 1)])
    stepper.run()
    stepper.check_outputs()
    assert (mean.cached, last.cached) == (0, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_preempted_begins_anew(kind: Kind) -> None:
    stepper = Stepper(num_pages=13, page_size=4, max_rows=3, max_step_tokens=3, prefix_cache=False)
    writers = [stepper.add(prompt_of(4, first), 18) for first in (1, 2)]
    for _ in range(4):
        stepper.step()
    stepper.pool([prompt_of(24, 3)], kind, priority=1)
    stepper.run()
    assert stepper.scheduler.counters.preemptions > 0
    stepper.check_outputs()
    assert all(stepper.got[writer].finish_reason == "length" for writer in writers)


def test_one_that_is_aborted_gives_everything_back() -> None:
    stepper = Stepper(max_step_tokens=8)
    first, second, third = stepper.pool([prompt_of(30), prompt_of(30, 1), prompt_of(30, 2)], "mean")
    stepper.schedule()
    stepper.schedule()
    for sequence in (first, third):
        stepper.abort(sequence)
    stepper.run()
    stepper.check_outputs()
    assert stepper.got[second].finish_reason == "stop"


def test_numbers_that_are_not_finite_end_it_and_stay_out_of_the_cache() -> None:
    stepper = Stepper()
    (broken,) = stepper.pool([prompt_of(40)])
    plan = stepper.schedule()
    assert plan is not None
    (update,) = stepper.commit(broken={plan.prefill[0].row})
    assert (update.sequence, update.finite) == (broken, False)
    (again,) = stepper.pool([prompt_of(40)])
    stepper.run()
    assert again.cached == 0


def test_a_failed_step_fails_them() -> None:
    stepper = Stepper()
    (sequence,) = stepper.pool([prompt_of(40)])
    stepper.schedule()
    assert stepper.fail() == [sequence]
    stepper.run()


def test_the_prompts_of_a_request_enter_the_queue_together_or_not_at_all() -> None:
    stepper = Stepper(max_queue=3)
    stepper.pool([prompt_of(4, first) for first in range(5)])  # an empty queue accepts a request of any size
    with pytest.raises(QueueFullError):
        stepper.pool([prompt_of(4)])
    while stepper.scheduler.waiting:
        stepper.step()
    stepper.run()
    stepper.add(prompt_of(4))
    with pytest.raises(QueueFullError):
        stepper.pool([prompt_of(4, first) for first in range(3)])
    assert stepper.scheduler.waiting == 1
    stepper.run()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_fill_the_pool_to_its_last_page(kind: Kind) -> None:
    stepper = Stepper(num_pages=4, page_size=4)
    stepper.pool([prompt_of(12)], kind)
    with pytest.raises(ContextLengthError, match="12 tokens"):
        stepper.pool([prompt_of(3), prompt_of(13)], kind)
    assert stepper.scheduler.waiting == 1
    stepper.run()
    stepper.check_outputs()


def test_one_whose_step_is_given_up_begins_anew() -> None:
    stepper = Stepper()
    writer = stepper.add(prompt_of(5))
    stepper.schedule()
    stepper.pool([prompt_of(40, 1)])
    stepper.schedule()
    assert stepper.fail() == [writer]
    stepper.schedule()
    stepper.scheduler.check_integrity()
    stepper.run()
    stepper.check_outputs()


def test_one_that_was_preempted_after_its_last_chunk_has_ended() -> None:
    stepper = Stepper(num_pages=6, page_size=4, max_rows=2, prefix_cache=False)
    writer = stepper.add(prompt_of(4, 1), 14)
    stepper.step()
    (sequence,) = stepper.pool([prompt_of(8)], priority=1)
    while sequence.phase is not Phase.PREEMPTED:
        stepper.schedule()
    assert sequence.in_flight
    stepper.run()
    stepper.check_outputs()
    assert stepper.got[writer].finish_reason == "length"

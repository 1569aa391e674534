"""Out of pages: cached pages are evicted first, then the youngest sequences are preempted, no more than needed."""

from __future__ import annotations

import pytest

from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.memory import SequenceMemory
from aengine.scheduling.sequence import Sequence
from aengine.step_plan import StepPlan
from tests.scheduling.stepping import Stepper, prompt_of


def sequence_of(tokens: list[int], ticket: int = 0) -> Sequence:
    return Sequence(
        prompt=packed(tokens), params=SamplingParams(), seed=0, stop_ids=(), max_total=99, rank=(0.0, ticket)
    )


def test_a_resumed_sequence_reads_what_is_left_of_its_pages_from_the_cache() -> None:
    stepper = Stepper(num_pages=9, page_size=4, max_rows=2)
    older = stepper.add(prompt_of(16), max_tokens=5)
    victim = stepper.add(prompt_of(8, first=1), max_tokens=20)
    stepper.run()
    assert older.output == stepper.expected(older)
    assert victim.output == stepper.expected(victim)
    counters = stepper.scheduler.counters
    assert counters.preemptions == 1
    assert counters.cached_tokens == 0  # a request's own pages do not count as hits
    assert counters.computed_tokens < 16 + 4 + 8 + 19 + 8  # without the cache it would compute 8 and more once again


def test_pages_promised_by_a_victim_in_flight_cause_no_further_preemption() -> None:
    stepper = Stepper(num_pages=9, page_size=4, lookahead=2)
    for first in range(2):
        stepper.add(prompt_of(8, first), max_tokens=8)  # both need a page in the second and in the sixth step
    stepper.add(prompt_of(5, first=2), max_tokens=8)  # needs one in the fifth, finds none and is preempted
    stepper.run()
    assert stepper.scheduler.counters.preemptions == 1
    stepper.check_outputs()


def test_what_a_sequence_gives_back_is_what_it_alone_holds() -> None:
    memory = SequenceMemory(num_pages=10, page_size=4, prefix_cache=True)
    first = sequence_of(prompt_of(10))
    assert memory.admit(first, headroom=0)
    assert memory.returnable(first) == 3
    first.computed = 10
    memory.publish(first)  # two of them belong to the tree now
    assert memory.returnable(first) == 3
    second = sequence_of(prompt_of(11), ticket=1)
    assert memory.admit(second, headroom=0)
    assert second.pages[:2] == first.pages[:2]
    assert memory.returnable(first) == memory.returnable(second) == 1
    before = memory.available
    memory.release(second)
    assert memory.available == before + 1


def test_what_another_choice_still_reads_is_cached_and_stays_locked() -> None:
    memory = SequenceMemory(num_pages=10, page_size=4, prefix_cache=True)
    leader, sibling = sequence_of(prompt_of(10)), sequence_of(prompt_of(10))
    assert memory.admit(leader, headroom=0)
    leader.launched = 10
    plan = StepPlan(step=0, new_rows=[], new_pages=[], decode=[], prefill=[], page_copies=[])
    memory.fork(leader, sibling, plan)
    assert plan.page_copies == [(leader.pages[2], sibling.pages[2])]
    leader.computed = 10
    shared = sibling.pages[:2]
    memory.release(leader)
    assert (memory.tree.cached_pages, memory.tree.evictable_pages) == (2, 0)
    assert memory.tree.match(sequence_of(prompt_of(10)).prompt).pages == shared
    memory.release(sibling)
    assert (memory.tree.evictable_pages, memory.available) == (2, 9)


def test_a_reservation_evicts_no_more_than_it_needs() -> None:
    memory = SequenceMemory(num_pages=10, page_size=4, prefix_cache=True)
    sequence = sequence_of(prompt_of(25))
    assert memory.admit(sequence, headroom=0)
    sequence.computed = 24
    memory.release(sequence)
    assert (memory.allocator.free, memory.tree.cached_pages, memory.available) == (3, 6, 9)
    assert memory.reserve(5)
    assert (memory.allocator.free, memory.tree.cached_pages, memory.available) == (5, 4, 9)
    assert not memory.reserve(10)


def test_headroom_is_kept_available_and_not_evicted() -> None:
    memory = SequenceMemory(num_pages=10, page_size=4, prefix_cache=True)
    cached = sequence_of(prompt_of(25))
    assert memory.admit(cached, headroom=0)
    cached.computed = 24
    memory.release(cached)
    assert memory.admit(sequence_of(prompt_of(9, first=1)), headroom=6)
    assert memory.tree.cached_pages == 6
    assert not memory.admit(sequence_of(prompt_of(1, first=2)), headroom=6)
    assert memory.tree.cached_pages == 6


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_pool_for_one_and_a_half_serves_everyone(rows: int) -> None:
    stepper = Stepper(num_pages=13, page_size=4, max_rows=rows)
    for first in range(20):
        stepper.add(prompt_of(9 + first % 7, first), max_tokens=16)
    stepper.run(limit=3000)
    assert stepper.scheduler.counters.preemptions > 0
    stepper.check_outputs()

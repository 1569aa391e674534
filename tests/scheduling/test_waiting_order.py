"""The order of admission, prefill and preemption: lower priority values first, then first come, first served."""

from __future__ import annotations

from aengine.scheduling.sequence import Phase, Sequence
from tests.scheduling.stepping import AGING, Stepper, prompt_of


def admission_order(stepper: Stepper, sequences: list[Sequence]) -> list[int]:
    """Return the indices of the sequences in the order in which they got a row."""
    order: list[int] = []
    while not stepper.scheduler.idle:
        stepper.step()
        order += [place for place, one in enumerate(sequences) if one.row >= 0 and place not in order]
    return order


def test_first_come_first_served() -> None:
    stepper = Stepper(max_rows=1)
    sequences = [stepper.add(prompt_of(4, first), arrival=float(first)) for first in range(5)]
    assert admission_order(stepper, sequences) == [0, 1, 2, 3, 4]


def test_a_lower_priority_value_comes_first() -> None:
    stepper = Stepper(max_rows=1)
    sequences = [stepper.add(prompt_of(4), priority=priority) for priority in (0, 2, -1, 0, 1, -1)]
    assert admission_order(stepper, sequences) == [2, 5, 0, 3, 4, 1]


def test_no_request_starves_under_a_constant_stream_of_better_priority() -> None:
    stepper = Stepper(max_rows=1)
    patient = stepper.add(prompt_of(4), max_tokens=1, arrival=0.0, priority=1)
    second = 0
    while patient.phase is Phase.WAITING:  # one request of better priority comes each second, and one is served
        second += 1
        stepper.add(prompt_of(4, first=second), max_tokens=1, arrival=float(second))
        stepper.step()
        stepper.step()
    assert second == AGING  # overtaken only by requests that came within `AGING` seconds
    stepper.run()


def test_a_short_prompt_does_not_overtake_the_head_of_the_queue() -> None:
    stepper = Stepper(num_pages=9, page_size=4)
    stepper.add(prompt_of(16), max_tokens=8)
    head = stepper.add(prompt_of(20, first=1), max_tokens=1)
    short = stepper.add(prompt_of(1, first=2), max_tokens=1)  # would fit at once
    while head.row < 0:
        assert short.row < 0
        stepper.step()
    stepper.run()
    stepper.check_outputs()


def test_a_prompt_in_chunks_is_finished_before_the_next_one_starts() -> None:
    stepper = Stepper(max_step_tokens=10)
    stepper.add(prompt_of(25))
    stepper.add(prompt_of(8, first=1))
    chunks = [[(chunk.start, len(chunk.token_ids)) for chunk in plan.prefill] for plan in stepper.run()]
    assert chunks[:4] == [[(0, 10)], [(10, 10)], [(20, 5), (0, 5)], [(5, 3)]]


def test_decodes_never_wait_for_a_long_prompt() -> None:
    stepper = Stepper(max_rows=4, max_step_tokens=8)
    decoding = stepper.add(prompt_of(4), max_tokens=30)
    stepper.step()
    stepper.add(prompt_of(100, first=1), max_tokens=1)
    for plan in stepper.run()[:14]:
        assert plan.decode == [0]
        assert plan.num_tokens == 8  # the long prompt gets the rest of every step
    assert stepper.got[decoding].finish_reason == "length"


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    stepper = Stepper(num_pages=8, page_size=4, max_rows=3)
    low = stepper.add(prompt_of(7, first=1), max_tokens=10, arrival=0.0, priority=1)
    stepper.step()  # it runs before the others come
    plain = stepper.add(prompt_of(7), max_tokens=10, arrival=1.0)
    young = stepper.add(prompt_of(4, first=2), max_tokens=10, arrival=2.0)
    gave_way: list[Sequence] = []
    while not gave_way:
        stepper.step()
        gave_way = [one for one in (plain, low, young) if one.phase in (Phase.PREEMPTED, Phase.WAITING) and one.output]
    assert gave_way == [low]
    stepper.run()
    stepper.check_outputs()


def test_a_preempted_sequence_resumes_before_later_ones() -> None:
    stepper = Stepper(num_pages=6, page_size=4, max_rows=2)
    older = stepper.add(prompt_of(6), max_tokens=9)
    victim = stepper.add(prompt_of(8, first=1), max_tokens=8)
    later = stepper.add(prompt_of(1, first=2), max_tokens=1)
    while victim.phase is not Phase.FINISHED:
        assert later.row < 0 or victim.row >= 0
        stepper.step()
    assert older.phase is Phase.FINISHED
    stepper.run()
    assert stepper.scheduler.counters.preemptions == 1
    stepper.check_outputs()

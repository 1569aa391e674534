"""The cost of a step for the event loop, in function calls instead of time."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import FrameType

import pytest

from aengine.cache.radix import Match, RadixTree
from aengine.scheduling.planning.prefills import MAX_ADMISSIONS, MAX_LOOKED_UP
from aengine.step_plan import StepPlan
from tests.scheduling.stepping import Stepper, prompt_of


def calls(function: Callable[[], object]) -> int:
    """Return how many functions, Python's or built in, a call calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would call its callbacks at an arbitrary moment
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def step_cost(waiting: int, num_pages: int) -> int:
    """Return the calls of a step with two decoding sequences while `waiting` others wait."""
    stepper = Stepper(num_pages=num_pages, max_rows=2 if num_pages > 20 else 64, max_queue=10_000, lookahead=0)
    for first in range(2):
        stepper.add(prompt_of(90, first), max_tokens=40)
    for first in range(waiting):
        stepper.add(prompt_of(90, first=2 + first), max_tokens=40)
    for _ in range(4):
        stepper.step()
    assert stepper.scheduler.waiting == waiting
    return calls(stepper.scheduler.schedule)


@pytest.mark.parametrize("num_pages", [1000, 17], ids=["rows are short", "pages are short"])
def test_the_cost_of_a_step_does_not_depend_on_the_length_of_the_queue(num_pages: int) -> None:
    assert step_cost(10, num_pages) == step_cost(5000, num_pages)


@pytest.mark.parametrize("waiting", [1, 50])
def test_the_cost_of_a_step_does_not_depend_on_what_is_cached(waiting: int) -> None:
    """Return the calls of each step in which one leaves, one enters, and the oldest cached pages are evicted."""

    def costs(nodes: int) -> list[int]:
        stepper = Stepper(num_pages=nodes + 20, max_rows=2, lookahead=0)
        memory = stepper.scheduler.memory
        for number in range(nodes):
            (page,) = memory.allocator.take(1)
            stepper.device.fill(page, [2**23 + number] * 16)
            memory.tree.insert([2**23 + number] * 16, [page])
        for first in range(waiting + 2):
            stepper.add(prompt_of(90, first), max_tokens=5)
        return [calls(stepper.step) for _ in range(12)]

    assert costs(30) == costs(5000)


def test_a_step_that_only_decodes_looks_nothing_up() -> None:
    stepper = Stepper(max_rows=64, num_pages=2000)
    for first in range(64):
        stepper.add(prompt_of(10, first), max_tokens=30)
    while stepper.scheduler.waiting or not stepper.scheduler.running:
        stepper.step()
    stepper.step()
    plan = stepper.in_flight[-1]
    assert len(plan.decode) == 64
    assert not plan.new_rows
    assert not plan.prefill
    assert calls(stepper.scheduler.schedule) < 64 * 8 + 30


def test_a_burst_is_admitted_over_several_steps() -> None:
    stepper = Stepper(num_pages=5000, max_rows=256, max_step_tokens=8192)
    for first in range(256):
        stepper.add(prompt_of(3, first), max_tokens=10)  # 768 tokens in all, which fit into one step
    admitted = [len(plan.new_rows) for plan in stepper.run() if plan.new_rows]
    assert admitted == [MAX_ADMISSIONS] * 4
    stepper.check_outputs()


def test_a_burst_of_long_cached_prompts_is_admitted_by_the_tokens_to_look_up() -> None:
    stepper = Stepper(num_pages=5000, max_rows=64, max_step_tokens=8192)
    length = MAX_LOOKED_UP // 8
    stepper.add(prompt_of(length), max_tokens=1)
    stepper.run()
    for _ in range(24):
        stepper.add(prompt_of(length), max_tokens=2)
    admitted = []
    while stepper.scheduler.waiting:
        admitted.append(len(stepper.scheduler.schedule().new_rows))  # type: ignore[union-attr]
    assert admitted == [9, 9, 6]


def test_choices_that_fork_count_towards_the_burst() -> None:
    stepper = Stepper(num_pages=5000, max_rows=256, max_step_tokens=8192)
    for first in range(6):
        stepper.request(prompt_of(3, first), max_tokens=10, n=40)
    admitted = [len(plan.new_rows) for plan in stepper.run() if plan.new_rows]
    assert admitted == [80, 80, 80]  # the second request exceeds 64
    stepper.check_outputs()


FAMILY, LONG = 128, 30_000  # choices of one request, tokens of its prompt


@pytest.mark.slow
def test_no_step_of_a_request_with_many_choices_of_a_long_prompt_costs_much_per_page() -> None:
    """A forking choice costs little more than one that decodes, and nothing for each page that it shares."""
    stepper = Stepper(num_pages=10_000, max_rows=256, max_step_tokens=16_384)
    family = stepper.request(prompt_of(LONG), max_tokens=4, n=FAMILY)
    most = {"schedule": 0, "commit": 0}
    while not stepper.scheduler.idle:
        plans: list[StepPlan | None] = []
        most["schedule"] = max(most["schedule"], calls(lambda: plans.append(stepper.scheduler.schedule())))  # noqa: B023
        if (plan := plans[0]) is not None:
            stepper.device.launch(plan)
            stepper.in_flight.append(plan)
        if plan is None or len(stepper.in_flight) > 1:
            done = stepper.in_flight.popleft()
            result = stepper.device.result(done)
            most["commit"] = max(most["commit"], calls(lambda: stepper.scheduler.commit(done, result)))  # noqa: B023
    assert [len(one.output) for one in family] == [4] * FAMILY
    assert most["schedule"] < 70 * FAMILY
    assert most["commit"] < 70 * FAMILY


def test_choices_that_wait_take_no_memory_of_their_own() -> None:
    stepper = Stepper(num_pages=10_000, max_queue=10_000)
    prompts = [prompt_of(LONG, first) for first in range(20)]
    tracemalloc.start()
    try:
        for prompt in prompts:
            stepper.request(prompt, n=FAMILY)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    in_the_test = 20 * LONG * 8  # a list of each prompt
    assert taken - in_the_test < 20 * LONG * 4 * 1.2
    assert stepper.scheduler.waiting == 20 * FAMILY


def test_leaving_the_queue_does_not_search_it() -> None:
    stepper = Stepper(max_queue=10_000)
    sequences = [stepper.add(prompt_of(3, first)) for first in range(5000)]
    most = max(calls(lambda one=one: stepper.abort(one)) for one in sequences[:2000])  # type: ignore[misc]
    assert most < 40
    assert stepper.scheduler.waiting == 3000


@pytest.mark.slow
def test_all_choices_of_a_request_leave_for_little_each() -> None:
    stepper = Stepper(num_pages=10_000, max_rows=256, max_step_tokens=LONG)
    family = stepper.request(prompt_of(LONG), n=FAMILY)
    for _ in range(3):
        stepper.step()
    while stepper.in_flight:
        stepper.commit()

    def leave() -> None:
        for sequence in family:
            stepper.scheduler.abort(sequence)

    assert calls(leave) < 80 * FAMILY
    assert stepper.scheduler.idle
    stepper.scheduler.check_integrity()


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[Seq[int]]:
    """Return the arguments of all lookups in any tree."""
    asked: list[Seq[int]] = []
    match = RadixTree.match

    def counted(tree: RadixTree, token_ids: Seq[int], salt: str | None = None) -> Match:
        asked.append(token_ids)
        return match(tree, token_ids, salt)

    monkeypatch.setattr(RadixTree, "match", counted)
    return asked


def test_a_request_that_has_to_wait_is_not_looked_up_in_every_step(looked_up: list[Seq[int]]) -> None:
    """Not with few or many free pages, if they are not enough: only after a sequence has left."""
    stepper = Stepper(num_pages=101, max_rows=64)
    stepper.add(list(range(5000, 6264)), max_tokens=1)  # stays in the cache, and is evicted page by page
    stepper.run()
    running = stepper.add(prompt_of(160, 2), max_tokens=400)
    stepper.step()
    stepper.step()
    waiting = stepper.add(prompt_of(1500, 3), max_tokens=2)
    looked_up.clear()
    cached = stepper.scheduler.memory.tree.cached_pages
    for _ in range(350):
        stepper.step()
    assert stepper.scheduler.memory.tree.cached_pages < cached  # evictions alone cause no new lookup
    assert stepper.scheduler.waiting == 1
    assert len(looked_up) == 1
    stepper.abort(running)
    while waiting.row < 0:
        stepper.step()
    stepper.run()
    assert len(looked_up) <= 3
    stepper.check_outputs()


def test_a_request_that_has_to_wait_enters_once_its_prefix_is_cached(looked_up: list[Seq[int]]) -> None:
    """No sequence has left, and no page became free, but it needs fewer pages."""
    stepper = Stepper(num_pages=30, page_size=4, max_step_tokens=16)
    stepper.add(prompt_of(64), max_tokens=20)  # 16 pages
    stepper.step()
    waiting = stepper.add(prompt_of(60), max_tokens=4)  # 15 more, or one
    stepper.step()
    assert waiting.row < 0
    steps = 0
    while waiting.row < 0:
        stepper.step()
        steps += 1
    assert steps <= 5
    stepper.run()
    stepper.check_outputs()

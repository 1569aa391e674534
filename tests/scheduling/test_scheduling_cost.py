"""What a step costs the loop, in function calls rather than in time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import FrameType

import pytest

from aengine.cache.radix import Match
from aengine.scheduling.scheduler import MAX_ADMISSIONS, MAX_LOOKED_UP
from tests.scheduling.stepping import Stepper, prompt_of


def calls(function: Callable[[], object]) -> int:
    """How many functions, Python's or built in, a call calls."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection calls whoever listens to it, at a moment that is nobody's business here
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def step_cost(waiting: int, num_pages: int) -> int:
    """Calls of a step with two sequences that decode while so many wait."""
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
def test_the_cost_of_a_step_does_not_depend_on_the_number_of_those_who_wait(num_pages: int) -> None:
    assert step_cost(10, num_pages) == step_cost(5000, num_pages)


@pytest.mark.parametrize("waiting", [1, 50])
def test_the_cost_of_a_step_does_not_depend_on_what_is_cached(waiting: int) -> None:
    """Every step in which one leaves, one enters and the oldest of the cache makes room for it."""

    def costs(nodes: int) -> list[int]:
        stepper = Stepper(num_pages=nodes + 20, max_rows=2, lookahead=0)
        memory = stepper.scheduler.memory
        for number in range(nodes):
            memory.tree.insert([2**23 + number] * 16, memory.allocator.take(1))
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
        stepper.add(prompt_of(3, first), max_tokens=10)  # 768 tokens in all: the tokens of a step are no bound
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


def test_leaving_the_queue_does_not_search_it() -> None:
    stepper = Stepper(max_queue=10_000)
    sequences = [stepper.add(prompt_of(3, first)) for first in range(5000)]
    most = max(calls(lambda one=one: stepper.abort(one)) for one in sequences[:2000])  # type: ignore[misc]
    assert most < 40
    assert stepper.scheduler.waiting == 3000


def test_a_request_that_has_to_wait_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stepper = Stepper(num_pages=17, max_rows=64)
    for first in range(3):
        stepper.add(prompt_of(90, first), max_tokens=40)
    stepper.step()
    while stepper.scheduler.memory.available > 2:
        stepper.step()
    assert (stepper.scheduler.running, stepper.scheduler.waiting) == (2, 1)
    looked_up: list[Seq[int]] = []
    tree = stepper.scheduler.memory.tree
    match = tree.match

    def counted(token_ids: Seq[int], salt: str | None = None) -> Match:
        looked_up.append(token_ids)
        return match(token_ids, salt)

    monkeypatch.setattr(tree, "match", counted)
    stepper.step()
    assert not looked_up

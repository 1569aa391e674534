"""The tokens that the prefix cache saves from being computed."""

from __future__ import annotations

import pytest

from aengine.cache.image_keys import FIRST_KEY
from aengine.cache.radix import packed
from aengine.requests.sampling_params import SamplingParams
from aengine.scheduling.sequence import Sequence
from tests.scheduling.stepping import Stepper, prompt_of


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_shared_prefix_of_97_tokens_saves_96(lookahead: int) -> None:
    """Pages of 16 tokens: the second request finds six whole pages of its 102 tokens."""
    shared = prompt_of(97)
    computed = {}
    for prefix_cache in (True, False):
        stepper = Stepper(page_size=16, prefix_cache=prefix_cache, lookahead=lookahead)
        stepper.add(shared, max_tokens=1)
        stepper.run()
        before = stepper.device.tokens
        second = stepper.add([*shared, *prompt_of(5, first=1)], max_tokens=20)
        plan = stepper.step()
        assert plan is not None
        assert second.cached == (96 if prefix_cache else 0)
        assert plan.num_tokens == (6 if prefix_cache else 102)
        stepper.run()
        assert second.output == stepper.expected(second)
        assert len(second.output) == 20
        computed[prefix_cache] = stepper.device.tokens - before
    assert computed == {True: 25, False: 121}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_chat_of_five_turns_finds_four_fifths_of_its_prompts_in_the_cache(lookahead: int) -> None:
    """Each prompt is the whole conversation so far. Generated tokens are cached like prompts."""
    stepper = Stepper(page_size=16, lookahead=lookahead)
    history = prompt_of(120)  # the system prompt
    cached = []
    for turn in range(5):
        history = [*history, *prompt_of(24, first=1 + turn)]
        reply = stepper.add(history, max_tokens=40)
        stepper.run()
        cached.append(reply.cached)
        history = [*reply.prompt, *reply.output]
    stepper.check_outputs()
    counters = stepper.scheduler.counters
    assert cached == [0, 176, 240, 304, 368]  # all tokens except those of the last, partly filled page
    assert counters.prompt_tokens == 144 + 208 + 272 + 336 + 400
    assert counters.cached_tokens / counters.prompt_tokens == 0.8
    assert counters.computed_tokens == stepper.device.tokens == 1360 - 1088 + 5 * 39


def test_conversations_share_their_system_prompt() -> None:
    stepper = Stepper(page_size=16)
    system = prompt_of(120)
    for first in range(1, 4):
        stepper.add([*system, *prompt_of(24, first)])
        stepper.run()
    assert stepper.scheduler.counters.cached_tokens == 2 * 112


def test_tenants_share_nothing() -> None:
    stepper = Stepper(page_size=16)
    for tenant in (0, 1, 2):
        sequence = stepper.add(prompt_of(40), tenant=tenant)
        stepper.run()
        assert sequence.cached == 0
    again = stepper.add(prompt_of(40), tenant=1)
    stepper.run()
    assert again.cached == 32
    stepper.check_outputs()


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    stepper = Stepper(prefix_cache=False)
    stepper.add(prompt_of(100))
    stepper.run()
    memory = stepper.scheduler.memory
    assert memory.allocator.free == memory.usable_pages


def test_cached_pages_are_evicted_for_running_sequences() -> None:
    stepper = Stepper(num_pages=11, page_size=4)
    for first in range(6):  # five times the size of the pool
        stepper.add(prompt_of(20, first), max_tokens=13)
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages >= 8
    stepper.check_outputs()


def test_a_request_that_has_to_wait_does_not_empty_the_cache_in_vain() -> None:
    stepper = Stepper(num_pages=13, page_size=4)
    stepper.add(prompt_of(16), max_tokens=1)
    stepper.run()
    memory = stepper.scheduler.memory
    assert memory.tree.cached_pages == 4
    stepper.add(prompt_of(16, first=1), max_tokens=8)  # four of the eight free pages
    stepper.add(prompt_of(40, first=2), max_tokens=1)  # ten, which are not available now
    stepper.step()
    assert stepper.scheduler.waiting == 1
    assert memory.tree.cached_pages == 4
    stepper.run()
    stepper.check_outputs()


@pytest.mark.parametrize("turns", range(1, 7))
def test_nothing_that_was_begun_before_the_cache_was_flushed_is_found_after_it(turns: int) -> None:
    """Between two chunks, while they are in flight, while it decodes, and when it has ended."""
    stepper = Stepper(page_size=4, max_step_tokens=8)
    running = stepper.add(prompt_of(22), max_tokens=3)
    for _ in range(turns):
        stepper.step()
    stepper.flush()
    stepper.run()
    assert stepper.got[running].finish_reason == "length"  # it continues with its own pages
    memory = stepper.scheduler.memory
    assert memory.allocator.free == memory.usable_pages
    again = stepper.add(prompt_of(22), max_tokens=3)
    stepper.run()
    assert again.cached == 0
    third = stepper.add(prompt_of(22), max_tokens=3)
    stepper.run()
    assert third.cached == 20
    stepper.check_outputs()


def test_a_request_preempted_before_a_flush_begins_anew_and_is_cached() -> None:
    stepper = Stepper(num_pages=9, page_size=4, max_rows=2)
    stepper.add(prompt_of(16), max_tokens=5)
    victim = stepper.add(prompt_of(8, first=1), max_tokens=20)
    while not stepper.scheduler.counters.preemptions:
        stepper.step()
    stepper.flush()
    stepper.run()
    assert stepper.scheduler.memory.tree.cached_pages > 0
    stepper.check_outputs()
    assert len(victim.output) == 20


def test_the_cache_compares_keys_of_images_and_ids_of_text() -> None:
    keys = [5, FIRST_KEY, FIRST_KEY, 6]
    sequence = Sequence(packed([5, 120, 120, 6]), SamplingParams(), 0, (), 9, (0.0, 0), prompt_keys=packed(keys))
    sequence.output = [7, 8]
    for start in range(7):
        for end in range(start, 7):
            assert sequence.keys(start, end).tolist() == [*keys, 7, 8][start:end]
            assert sequence.ids(start, end).tolist() == [5, 120, 120, 6, 7, 8][start:end]

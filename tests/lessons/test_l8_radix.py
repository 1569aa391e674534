"""Lesson 8: the radix tree. Prompts with the same beginning share its pages, which are computed once.

Read: aengine/cache/radix.py, aengine/scheduling/memory.py.
"""

from __future__ import annotations

from aengine.model.decoder import Decoder
from tests.lessons.conftest import NEW_TOKENS, Reference
from tests.lessons.rig import Rig


def test_the_second_time_only_what_is_new_is_computed(decoder: Decoder, reference: Reference) -> None:
    """97 shared tokens in pages of 16: 96 are found, 6 of 102 are computed; 25 tokens of work instead of 121."""
    shared = [300 + place * 7 % 1000 for place in range(97 - len(reference.prompt_ids))] + reference.prompt_ids
    first, second = [*shared, 311], [*shared, 301, 302, 303, 304, 305]
    work = {}
    outputs = {}
    for prefix_cache in (True, False):
        rig = Rig(decoder, prefix_cache=prefix_cache)
        rig.add(first, NEW_TOKENS)
        rig.run()
        before = rig.scheduler.counters.computed_tokens
        ours = rig.add(second, NEW_TOKENS)
        rig.run()
        work[prefix_cache] = rig.scheduler.counters.computed_tokens - before
        outputs[prefix_cache] = ours.output
        assert ours.cached == (96 if prefix_cache else 0)
    assert work == {True: 25, False: 121}
    assert outputs[True] == outputs[False]


def test_a_prompt_found_whole_still_computes_its_last_token(decoder: Decoder, reference: Reference) -> None:
    prompt = ([300 + place for place in range(32)] + reference.prompt_ids)[-32:]
    rig = Rig(decoder)
    once, twice = (rig.add(prompt, NEW_TOKENS) for _ in range(2))
    rig.run()
    again = rig.add(prompt, NEW_TOKENS)
    rig.run()
    assert again.cached == 16  # not 32: logits come from computing, not from the cache
    assert once.output == twice.output == again.output


def test_the_reference_comes_out_of_a_warm_cache_too(decoder: Decoder, reference: Reference) -> None:
    rig = Rig(decoder, page_size=2)
    for _ in range(3):
        ours = rig.add(reference.prompt_ids, NEW_TOKENS)
        rig.run()
        assert ours.output == reference.output_ids
    assert ours.cached


def test_the_next_turn_of_a_chat_finds_the_answer_before_it(decoder: Decoder, reference: Reference) -> None:
    rig = Rig(decoder)
    prompt = [300 + place for place in range(30)]
    answer = rig.add(prompt, NEW_TOKENS)
    rig.run()
    turn = rig.add([*prompt, *answer.output, 301, 302], 1)
    rig.run()
    assert turn.cached == (30 + NEW_TOKENS - 1) // 16 * 16  # prompt and answer, without the last token, which has no KV

"""Faults that engines with speculation have had. Each test's name says what must not happen."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from aengine.requests.structured import Structured
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.speculation.answers import (
    EOS,
    Request,
    answers,
    assert_same,
    book_of,
    speculating,
    without_speculation,
)
from tests.engine.speculation.replay import Drafts

pytestmark = pytest.mark.anyio

PROMPTS = [list(range(start, start + 25)) for start in (300, 1300, 2300)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}


async def both(requests: Sequence[Request], right: float = 0.9, **knobs: Any) -> list[Completion]:
    """Return the answers of an engine that speculates, after comparing them with those of one that does not."""
    expected = await without_speculation(requests, **knobs)
    async with speculating(Drafts(book_of(requests, expected), right), **knobs) as engine:
        found = await answers(engine, requests)
        assert engine.stats().accepted_tokens > 0
    assert_same(found, expected, requests)
    return found


async def test_penalties_do_not_count_one_token_a_step() -> None:
    """Without counts of all tokens, the answers repeat themselves."""
    penalties = ({}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 2.0})
    found = await both([(prompt, GREEDY | penalty) for penalty in penalties for prompt in PROMPTS])
    most = [max(Counter(one.token_ids).values()) for one in found]
    count = len(PROMPTS)
    assert min(most[:count]) > 5
    assert max(most[count : 2 * count]) < 5


@pytest.mark.parametrize("right", [1.0, 0.0])
async def test_min_tokens_does_not_count_steps(right: float) -> None:
    """The stop token is the likeliest token of every draw, and is drafted at every place."""
    params = {"temperature": 0, "max_tokens": 40, "min_tokens": 23, "logit_bias": {EOS: 100.0}}
    requests: list[Request] = [(prompt, params) for prompt in PROMPTS]
    expected = await without_speculation(requests)
    async with speculating(Drafts(book_of(requests, expected), right, wrong=[EOS])) as engine:
        found = await answers(engine, requests)
    assert_same(found, expected, requests)
    assert [(len(one.token_ids), one.finish_reason) for one in found] == [(24, "stop")] * len(PROMPTS)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.5, "seed": 4, "logit_bias": {500: 5}},
    ],
    ids=["plain", "penalties", "temperature and bias"],
)
async def test_logprobs_are_neither_0_nor_those_after_penalties(params: dict[str, Any]) -> None:
    """They are the logprobs that the same tokens have in a prompt."""
    requests: list[Request] = [(prompt, GREEDY | {"logprobs": 3} | params) for prompt in PROMPTS]
    found = await both(requests)
    texts = [[*prompt, *one.token_ids] for prompt, one in zip(PROMPTS, found, strict=True)]
    scored = await without_speculation([(text, {"max_tokens": 1, "prompt_logprobs": 3}) for text in texts])
    for one, again in zip(found, scored, strict=True):
        scores = (again.choices[0].prompt_logprobs or ())[-len(one.token_ids) :]
        logprobs = one.logprobs or ()
        assert [score.logprob for score in logprobs] == pytest.approx([score.logprob for score in scores], abs=1e-3)
        for score, other in zip(logprobs, scores, strict=True):
            assert [top.token_id for top in score.top] == list(other.top_ids)
            assert [top.logprob for top in score.top] == pytest.approx(list(other.top), abs=1e-3)
        assert all(-math.inf < score.logprob < 0 for score in logprobs)


async def test_keys_and_values_in_fp8_lead_to_no_loop() -> None:
    """In pages of 4, so that refused drafts are written over in the middle of pages and across them."""
    requests: list[Request] = [(prompt, GREEDY | {"max_tokens": 90, "frequency_penalty": 0.3}) for prompt in PROMPTS]
    for right in (0.9, 0.3):
        await both(requests, right, kv_cache_dtype="fp8", page_size=4)


async def test_structured_output_beside_drafts_does_not_crash() -> None:
    words = Structured(regex="[a-z]{3,9}( [0-9]{2}){3}")
    requests: list[Request] = [(PROMPTS[0], GREEDY | {"logprobs": 1})]
    requests += [
        (prompt, {"max_tokens": 40, "temperature": 1.0, "seed": seed, "structured": words, "n": 2})
        for seed, prompt in enumerate(PROMPTS)
    ]
    found = await both(requests)
    assert all(choice.finish_reason == "stop" for one in found[1:] for choice in one.choices)


async def test_hits_of_the_prefix_cache_do_not_vanish() -> None:
    """The second turn of a chat finds all that was said, except for the page of the newest token."""
    requests: list[Request] = [(prompt, GREEDY) for prompt in PROMPTS]
    expected = await without_speculation(requests)
    async with speculating(Drafts(book_of(requests, expected), right=0.7)) as engine:
        first = await answers(engine, requests)
        second = await answers(
            engine, [([*prompt, *one.token_ids, 301], GREEDY) for (prompt, _), one in zip(requests, first, strict=True)]
        )
    assert [one.usage.cached_tokens for one in second] == [(25 + 40 - 1) // 16 * 16] * len(PROMPTS)


async def test_a_request_can_switch_drafts_off_beside_others() -> None:
    requests: list[Request] = [(prompt, GREEDY) for prompt in PROMPTS]
    expected = await without_speculation(requests)
    async with speculating(Drafts(book_of(requests, expected))) as engine:
        sizes: dict[bool, list[int]] = {}

        async def count(prompt: list[int], speculation: bool) -> None:
            answer = engine.generate(prompt, **GREEDY, speculation=speculation)
            sizes[speculation] = [len(fragment.token_ids) async for fragment in answer]

        async with asyncio.TaskGroup() as tasks:
            for speculation in (True, False):
                tasks.create_task(count(PROMPTS[0], speculation))
        await idle(engine)
    assert sizes[False] == [1] * 40
    assert sizes[True] == [1, *[5] * 7, 4]


async def test_the_last_token_is_neither_lost_nor_followed_by_others() -> None:
    """Every fragment adds to the text, and the fragments of a stream are the whole answer."""
    requests: list[Request] = [(prompt, GREEDY | {"max_tokens": most}) for prompt in PROMPTS for most in range(1, 9)]
    expected = await without_speculation(requests)
    async with speculating(Drafts(book_of(requests, expected))) as engine:
        for (prompt, params), one in zip(requests, expected, strict=True):
            fragments = [fragment async for fragment in engine.generate(prompt, **params)]
            assert sum((fragment.token_ids for fragment in fragments), ()) == one.token_ids
            assert "".join(fragment.text for fragment in fragments) == one.text
            assert all(fragment.finish_reason is None for fragment in fragments[:-1])
            assert fragments[-1].finish_reason == "length"
            assert all(fragment.token_ids for fragment in fragments)

"""An output ends at the same token as without speculation, also in the middle of the tokens that a step brings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

import aengine
from aengine.types import Completion
from tests.engine.speculation.answers import (
    EOS,
    KNOBS,
    SHARED,
    Request,
    answers,
    assert_same,
    book_of,
    speculating,
    without_speculation,
)
from tests.engine.speculation.replay import Book, Drafts

pytestmark = pytest.mark.anyio

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": 1}
PROMPTS = [[*SHARED[:number], 300 + number] for number in range(1, 16, 5)]


@pytest.fixture(scope="module")
def whole() -> list[Completion]:
    """An answer of 20 tokens to each of `PROMPTS`."""
    return asyncio.run(without_speculation([(prompt, GREEDY | {"max_tokens": 20}) for prompt in PROMPTS]))


@pytest.fixture(scope="module")
def book(whole: list[Completion]) -> Book:
    return book_of([(prompt, {}) for prompt in PROMPTS], whole)


async def compare(requests: Sequence[Request], drafts: Drafts, **knobs: Any) -> None:
    """Compare answers and the number of generated tokens."""
    expected = await without_speculation(requests, **knobs)
    async with speculating(drafts, **knobs) as engine:
        found = await answers(engine, requests)
        generated = engine.stats().generated_tokens
    assert_same(found, expected, requests)
    assert generated == sum(one.usage.completion_tokens for one in expected)


@pytest.mark.parametrize("right", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lookahead", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_max_tokens_is_never_exceeded(lookahead: bool, right: float, book: Book) -> None:
    requests = [(prompt, GREEDY | {"max_tokens": most}) for prompt in PROMPTS for most in range(1, 12)]
    await compare(requests, Drafts(book, right), lookahead=lookahead)


@pytest.mark.parametrize("page_size", [16, pytest.param(1, marks=pytest.mark.slow)])
async def test_outputs_end_where_the_context_is_full(page_size: int, book: Book) -> None:
    requests = [(prompt, GREEDY | {"max_tokens": 32 - len(prompt)}) for prompt in PROMPTS]
    knobs = {"max_model_len": 32, "page_size": page_size, "num_pages": 3 * 32 // page_size + 1}
    await compare(requests, Drafts(book), **knobs)


@pytest.mark.parametrize("right", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
async def test_a_stop_token_ends_the_output_at_any_place_of_a_step(
    right: float, whole: list[Completion], book: Book
) -> None:
    requests = [
        (prompt, GREEDY | {"max_tokens": 20, "stop_token_ids": [stop], "include_stop": bool(stop % 2)})
        for prompt, completion in zip(PROMPTS, whole, strict=True)
        for stop in dict.fromkeys(completion.token_ids[:12])
    ]
    await compare(requests, Drafts(book, right))


async def test_min_tokens_lets_no_stop_token_pass_too_early() -> None:
    """Drafts are the stop tokens themselves, which may not be drawn before."""
    requests = [
        (PROMPTS[0], {"temperature": 0, "max_tokens": 20, "min_tokens": least, "logit_bias": {EOS: 100.0}})
        for least in range(12)
    ]
    expected = await without_speculation(requests)
    assert [one.usage.completion_tokens for one in expected] == [least + 1 for least in range(12)]
    await compare(requests, Drafts(right=0, wrong=[EOS]))
    await compare(requests, Drafts(book_of(requests, expected)))


@pytest.mark.parametrize("right", [1.0, pytest.param(0.7, marks=pytest.mark.slow)])
async def test_a_stop_string_ends_the_output_at_any_place_of_a_step(
    right: float, whole: list[Completion], book: Book
) -> None:
    """Stop strings are whole tokens, and strings that begin and end within tokens."""
    async with aengine.Engine(**KNOBS) as engine:
        stops = [
            (prompt, stop)
            for prompt, completion in zip(PROMPTS, whole, strict=True)
            for stop in _stops([engine.tokenizer.decode(completion.token_ids[:count]) for count in range(14)])
        ]
    requests = [
        (prompt, GREEDY | {"max_tokens": 20, "stop": [stop], "include_stop": bool(at % 2)})
        for at, (prompt, stop) in enumerate(stops)
    ]
    await compare(requests, Drafts(book, right))


def _stops(texts: list[str]) -> list[str]:
    """Return stop strings. texts: of the first tokens, one more in each."""
    added = [after[len(before) :] for before, after in pairwise(texts) if after.startswith(before)]
    across = [before[len(before) // 2 :] + after[: len(after) // 2 + 1] for before, after in pairwise(added)]
    return list(dict.fromkeys(stop for stop in added + across if stop))


async def test_a_stop_string_before_a_stop_token_of_the_same_step(whole: list[Completion], book: Book) -> None:
    """The stop token comes two tokens after the stop string. The output ends with the string."""
    async with aengine.Engine(**KNOBS) as engine:
        requests = [
            (
                prompt,
                GREEDY
                | {
                    "max_tokens": 20,
                    "stop": [engine.tokenizer.decode(completion.token_ids[at : at + 1])],
                    "stop_token_ids": [completion.token_ids[at + 2]],
                },
            )
            for prompt, completion in zip(PROMPTS, whole, strict=True)
            for at in range(1, 9)
            if engine.tokenizer.decode(completion.token_ids[at : at + 1]).strip("\ufffd ")
        ]
    await compare(requests, Drafts(book))

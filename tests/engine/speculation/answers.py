"""Requests with every parameter that a draw depends on, and comparisons of their answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import aengine
from aengine.requests.structured import Structured
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.speculation.replay import Book, Drafts

Request = tuple[list[int], dict[str, Any]]  # prompt and parameters

EOS = 4091
RNG = random.Random(23)
SHARED = [RNG.randrange(300, 4000) for _ in range(37)]
KNOBS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 32,
    "kv_cache_gib": 0.05,
    "torch_threads": 1,
    "progress": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.9, "seed": 1, "logprobs": 5},
    {"temperature": 0.8, "seed": 2, "top_p": 0.9, "top_k": 20, "logprobs": 0},
    {"temperature": 1.2, "seed": 3, "min_p": 0.02},
    {"temperature": 0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.1, "frequency_penalty": 1.0, "top_k": 50, "logprobs": 2},
    {"temperature": 0.7, "seed": 5, "logit_bias": {400: 3.0, 401: -5.0}, "min_p": 0.05},
    {"temperature": 0, "logit_bias": {EOS: 100.0}, "min_tokens": 9, "ignore_eos": False},
    {"temperature": 0, "bad_words": ["the", " a", "ing"], "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "allowed_token_ids": list(range(300, 330))},
    {"temperature": 0.8, "seed": 7, "top_p": 0.8, "n": 3, "logprobs": 1},
    {"temperature": 0, "n": 2, "repetition_penalty": 1.2, "bad_words": ["on"]},
    {"temperature": 1.0, "seed": 8, "n": 3, "presence_penalty": 0.7, "prompt_logprobs": 0},
    {"temperature": 0, "speculation": False},
    {"temperature": 0.7, "seed": 9, "structured": Structured(regex="[a-z]{3,9}( [0-9]+)*"), "ignore_eos": False},
]


def _requests() -> list[Request]:
    """Return two requests of each kind. Two of three prompts begin with `SHARED`."""
    requests = []
    for number, kind in enumerate(KINDS * 2):
        prompt = (SHARED if number % 3 else []) + [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 50))]
        requests.append((prompt, {"max_tokens": RNG.randint(10, 24), "ignore_eos": True, **kind}))
    return requests


REQUESTS = _requests()


async def answers(engine: aengine.Engine, requests: Sequence[Request]) -> list[Completion]:
    """Send all requests at once. At the end, check that every page and row is accounted for."""
    found = await asyncio.gather(*(engine.complete(prompt, **params) for prompt, params in requests))
    await idle(engine)
    return list(found)


async def without_speculation(requests: Sequence[Request], **knobs: Any) -> list[Completion]:
    """Return the answers of an engine without speculation."""
    async with aengine.Engine(**(KNOBS | knobs)) as engine:
        return await answers(engine, requests)


def book_of(requests: Sequence[Request], expected: Sequence[Completion]) -> Book:
    """Return a book with the answers to requests."""
    book = Book()
    for (prompt, _), completion in zip(requests, expected, strict=True):
        book.write(prompt, (choice.token_ids for choice in completion.choices))
    return book


def speculating(drafts: Drafts, **knobs: Any) -> aengine.Engine:
    """Return an engine that drafts as the test wants."""
    return aengine.Engine(start=drafts.start(), **(KNOBS | knobs))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion], requests: Sequence[Request]) -> None:
    """Check that answers are equal in everything but cached tokens; logprobs up to rounding."""
    for one, other, (_, params) in zip(found, expected, requests, strict=True):
        assert one.usage.prompt_tokens == other.usage.prompt_tokens
        assert one.usage.completion_tokens == other.usage.completion_tokens, params
        for choice, same in zip(one.choices, other.choices, strict=True):
            (exact, numbers), (exact_same, numbers_same) = _parts(choice), _parts(same)
            assert exact == exact_same, params
            assert numbers == pytest.approx(numbers_same, abs=1e-3), params


def _parts(value: object) -> tuple[Any, list[float]]:
    """Return an answer in builtins without its floats, and its floats."""
    numbers: list[float] = []

    def without_floats(value: object) -> object:
        match value:
            case float():
                numbers.append(value)
                return None
            case dict():
                return {key: without_floats(one) for key, one in value.items()}
            case list() | tuple():
                return [without_floats(one) for one in value]
        return value

    return without_floats(msgspec.to_builtins(value)), numbers

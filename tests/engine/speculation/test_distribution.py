"""Draws of requests without a seed have the model's distribution, whatever is drafted."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

import aengine
from tests.engine.conftest import idle
from tests.engine.speculation.answers import KNOBS, speculating
from tests.engine.speculation.replay import Book, Drafts

pytestmark = pytest.mark.anyio

Output = tuple[int, ...]

PROMPT = list(range(300, 320))
TOKENS = 3
REQUESTS, CHOICES = 40, 20
TEMPERATURE = 2.0
LIMIT = 5.0  # standard deviations; a right engine exceeds it once in three million runs


async def likeliest(engine: aengine.Engine) -> Output:
    """Return the four likeliest tokens after the prompt. The requests may draw no other tokens."""
    one = await engine.complete(PROMPT, max_tokens=1, logprobs=4)
    return tuple(top.token_id for top in (one.logprobs or ())[0].top)


async def probabilities(engine: aengine.Engine, ids: Output, presence: float) -> dict[Output, float]:
    """Return the probability of each output, computed from logprobs of prompts."""
    outputs = list(itertools.product(ids, repeat=TOKENS))
    scored = await asyncio.gather(
        *(engine.complete([*PROMPT, *output], max_tokens=1, prompt_logprobs=0) for output in outputs)
    )
    weights: dict[Output, float] = {}  # by the output up to this token, not normed
    for output, one in zip(outputs, scored, strict=True):
        logprobs = [score.logprob for score in one.choices[0].prompt_logprobs or ()][-TOKENS:]
        for place, logprob in enumerate(logprobs):
            penalty = presence if output[place] in output[:place] else 0.0
            weights[output[: place + 1]] = math.exp((logprob - penalty) / TEMPERATURE)

    def share(output: Output) -> float:
        before = output[:-1]
        return weights[output] / sum(weights[(*before, token_id)] for token_id in ids)

    return {output: math.prod(share(output[:count]) for count in range(1, TOKENS + 1)) for output in outputs}


def deviation(counts: Mapping[Output, int], expected: Mapping[Output, float]) -> float:
    """Return how many standard deviations the chi-square of counts lies above its mean, by Wilson and Hilferty."""
    total = sum(counts.values())
    rare = {output for output, share in expected.items() if share * total < 8}
    cells = [(counts.get(output, 0), share * total) for output, share in expected.items() if output not in rare]
    if rare:
        cells.append((sum(counts.get(output, 0) for output in rare), sum(expected[one] for one in rare) * total))
    freedom = len(cells) - 1
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


@pytest.mark.parametrize("presence", [0.0, pytest.param(1.5, marks=pytest.mark.slow)])
async def test_counts_of_outputs_fit_their_probabilities(presence: float) -> None:
    """Most drafts are the likeliest tokens, so that many are accepted and many refused."""
    async with aengine.Engine(**KNOBS) as plain:
        ids = await likeliest(plain)
        expected = await probabilities(plain, ids, presence)
    assert sum(expected.values()) == pytest.approx(1.0)
    book = Book()
    book.write(PROMPT, sorted(expected, key=expected.__getitem__, reverse=True))
    asked: dict[str, Any] = {
        "n": CHOICES,
        "max_tokens": TOKENS,
        "temperature": TEMPERATURE,
        "presence_penalty": presence,
        "allowed_token_ids": ids,
        "ignore_eos": True,
    }
    async with speculating(Drafts(book, 0.8, most=2, wrong=ids), max_queue=REQUESTS * CHOICES) as engine:
        found = await asyncio.gather(*(engine.complete(PROMPT, **asked) for _ in range(REQUESTS)))
        await idle(engine)
        stats = engine.stats()
    counts = Counter(choice.token_ids for one in found for choice in one.choices)
    assert counts.total() == REQUESTS * CHOICES
    assert 0.2 < stats.accepted_tokens / stats.drafted_tokens < 0.8
    assert deviation(counts, expected) < LIMIT


def test_counts_that_do_not_fit_are_found() -> None:
    expected = {(a, b): 0.25 * (0.4 if a == b else 0.2) for a in range(4) for b in range(4)}
    right = {output: round(share * 2000) for output, share in expected.items()}
    more_repeats = {(a, b): count + (60 if a == b else -20) for (a, b), count in right.items()}
    assert deviation(right, expected) < 0
    assert deviation(more_repeats, expected) > LIMIT

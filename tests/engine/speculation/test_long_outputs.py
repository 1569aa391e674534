"""10,000 greedy tokens are those without speculation. `EVERY_FAMILY=1` tries all families instead of three."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

import aengine
from aengine.types import Choice
from tests.engine.speculation.answers import KNOBS, Request, answers, book_of, speculating
from tests.engine.speculation.replay import Drafts
from tests.engine.speculation.test_families import CASES, write_family

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

FAMILIES = CASES if os.environ.get("EVERY_FAMILY") else ("gpt-oss", "gemma3", "deepseek-v3")
ROWS, TOKENS = 50, 200
RNG = random.Random(8)
REQUESTS: list[Request] = [
    (
        [RNG.randrange(300, 4000) for _ in range(RNG.randint(1, 40))],
        {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True},
    )
    for _ in range(ROWS)
]


def first_difference(found: Choice, expected: Choice) -> int | None:
    pairs = zip(found.token_ids, expected.token_ids, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)


async def draws_at(engine: aengine.Engine, prompt: list[int], output: Sequence[int], at: int) -> set[int]:
    """Return what the engine draws at a place of an output, if its prompt ends there or up to three tokens before."""
    found = set()
    for cut in range(max(0, at - 3), at + 1):
        again = await engine.complete([*prompt, *output[:cut]], temperature=0, max_tokens=at - cut + 1, ignore_eos=True)
        found.add(again.token_ids[-1])
    return found


@pytest.mark.parametrize("family", FAMILIES)
async def test_ten_thousand_greedy_tokens_are_those_without_speculation(family: str, tmp_path: Path) -> None:
    """Where two tokens or two experts are equally likely up to rounding, an output may go on with the other one.

    Then an engine without speculation does the same if its prompt ends at another place.
    """
    knobs = KNOBS | {"model": str(write_family(family, tmp_path)), "max_model_len": 256, "max_num_seqs": ROWS}
    async with aengine.Engine(**knobs) as plain:
        expected = await answers(plain, REQUESTS)
    drafts = Drafts(book_of(REQUESTS, expected), right=0.7)
    async with speculating(drafts, **knobs) as engine:
        found = await answers(engine, REQUESTS)
    assert drafts.accepted > ROWS * TOKENS / 4
    others = [
        (prompt, one.token_ids, at)
        for (prompt, _), one, same in zip(REQUESTS, found, expected, strict=True)
        if (at := first_difference(one.choices[0], same.choices[0])) is not None
    ]
    assert len(others) <= ROWS // 10
    if others:
        async with aengine.Engine(**knobs) as plain:
            for prompt, output, at in others:
                assert output[at] in await draws_at(plain, prompt, output, at)

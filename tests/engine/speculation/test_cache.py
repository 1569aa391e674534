"""The prefix cache finds as much as without speculation, and holds no keys and values of refused drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import aengine
from aengine.types import Completion
from tests.engine.addons.chats import bring_whatever_there_is
from tests.engine.conftest import idle
from tests.engine.speculation.answers import EOS, KNOBS, Request, answers, assert_same, book_of, speculating
from tests.engine.speculation.replay import Drafts

pytestmark = pytest.mark.anyio

TURNS = 4
SLOW = pytest.mark.slow


async def talk(engine: aengine.Engine, params: dict[str, Any]) -> tuple[list[Request], list[Completion]]:
    """Run a chat of several turns. Each turn begins with all that was said before."""
    rng = random.Random(3)
    history: list[int] = []
    requests: list[Request] = []
    turns: list[Completion] = []
    for _ in range(TURNS):
        history += [rng.randrange(300, 4000) for _ in range(rng.randint(3, 40))]
        count = rng.randint(7, 30)
        options = {"max_tokens": count, "ignore_eos": True, "logprobs": 2, **params}
        if options.pop("ends_early", False):  # with the stop token as token `count`
            options |= {"max_tokens": 99, "ignore_eos": False, "min_tokens": count - 1, "logit_bias": {EOS: 100.0}}
        requests.append((list(history), options))
        turns.append(await engine.complete(history, **options))
        history += turns[-1].token_ids
    await idle(engine)
    return requests, turns


def hits(turns: list[Completion]) -> list[int]:
    return [turn.usage.cached_tokens for turn in turns]


@pytest.mark.turns("right")
@pytest.mark.parametrize("right", [pytest.param(0.0, marks=SLOW), 0.7, pytest.param(1.0, marks=SLOW)])
@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=SLOW)])
@pytest.mark.parametrize("params", [{}, {"ends_early": True}, {"temperature": 1.0, "seed": 4}], ids=str)
async def test_the_next_turn_of_a_chat_hits_as_much(params: dict[str, Any], page_size: int, right: float) -> None:
    """Turns end by length or with a stop token."""
    params = {"temperature": 0} | params
    async with aengine.Engine(**KNOBS, page_size=page_size) as plain:
        requests, expected = await talk(plain, params)
    assert all(hits(expected)[1:])
    async with speculating(Drafts(book_of(requests, expected), right), page_size=page_size) as engine:
        _, found = await talk(engine, params)
    assert_same(found, expected, requests)
    assert hits(found) == hits(expected)


@pytest.mark.parametrize("page_size", [1, pytest.param(16, marks=SLOW)])
async def test_an_answer_that_a_stop_string_cut_is_cached_up_to_there(page_size: int) -> None:
    prompt = list(range(300, 317))
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}

    async def cut(engine: aengine.Engine, stop: str) -> int:
        """Return the hits of the whole text after an answer that a stop string cut."""
        await engine.complete(prompt, **params, stop=[stop], cache_salt=stop)
        whole = await engine.complete([*prompt, *answer], **params, cache_salt=stop)
        await idle(engine)
        return whole.usage.cached_tokens

    async with aengine.Engine(**KNOBS, page_size=page_size) as plain:
        whole = await plain.complete(prompt, **params)
        answer = whole.token_ids
        texts = [plain.tokenizer.decode(answer[at : at + 1]) for at in range(len(answer))]
        stops = [stop for stop in dict.fromkeys(texts) if stop.strip("\ufffd ")][:8]
        expected = [await cut(plain, stop) for stop in stops]
    async with speculating(Drafts(book_of([(prompt, {})], [whole])), page_size=page_size) as engine:
        assert [await cut(engine, stop) for stop in stops] == expected


async def test_pages_that_come_back_from_host_memory(tmp_path: Path) -> None:
    """The pool holds a third of the chats. Later turns find the others in host memory and on a disk."""
    knobs = {"num_pages": 48, "max_num_seqs": 4, "host_cache_gib": 0.01, "disk_cache_dir": str(tmp_path)}
    prompts = [[300 + (number * 131 + place * 7) % 3000 for place in range(100)] for number in range(9)]
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    requests: list[Request] = [(prompt, greedy) for prompt in prompts]
    async with aengine.Engine(**KNOBS) as plain:
        expected = await answers(plain, requests)
        later = [([*prompt, *one.token_ids, 301], greedy) for prompt, one in zip(prompts, expected, strict=True)]
        expected += await answers(plain, later)
    drafts = Drafts(book_of(requests + later, expected), right=0.7)
    async with speculating(drafts, **knobs) as engine:
        bring_whatever_there_is(engine)
        found = [one for request in requests + later for one in await answers(engine, [request])]
        stats = engine.stats()
    assert_same(found, expected, requests + later)
    assert stats.cached_host_tokens > 0
    assert drafts.accepted > 0

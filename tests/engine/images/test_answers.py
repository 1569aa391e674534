"""Answers about images are those of transformers, however prompts are cut, cached and preempted."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aengine.types import Completion
from tests.engine.addons.chats import bring_whatever_there_is
from tests.engine.conftest import idle
from tests.engine.images.seeing import (
    CHATS,
    GREEDY,
    LAYERS,
    NEW,
    Chat,
    Seeing,
    answer,
    ask,
    computed,
    make_seeing,
    message,
    words,
)
from tests.model.towers.checkpoints import picture

pytestmark = pytest.mark.anyio

CASES = ("qwen3-5", "qwen3-vl", "mistral3", LAYERS)


@pytest.fixture(scope="module", params=CASES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_seeing(request.param, tmp_path_factory.mktemp(request.param))


def ids(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


async def test_ids_are_those_of_transformers(seeing: Seeing) -> None:
    async with seeing.engine(page_size=4) as engine:
        assert engine.no_images == ""
        first = await ask(engine)
        assert ids(first) == seeing.expected
        once = computed(engine)
        assert once == 6  # images that differ
        again = await ask(engine)
        assert ids(again) == seeing.expected
        assert computed(engine) == once
        prompt = await engine.encode_chat(message(CHATS[0]))
        assert first[0].usage.prompt_tokens == len(prompt.token_ids)
        assert prompt.images is not None
        assert [image.rows * image.columns for image in prompt.images.images]
        if seeing.case != "qwen3-5":  # states are kept every 64 tokens
            assert all(two.usage.cached_tokens > two.usage.prompt_tokens - 5 for two in again)


VARIANTS: dict[str, dict[str, Any]] = {
    "no prefix cache": {"prefix_cache": False},
    "no lookahead": {"lookahead": False},
    "chunks of 1": {"max_step_tokens": 1, "max_num_seqs": 1},
    "chunks of 2": {"max_step_tokens": 2, "max_num_seqs": 1, "page_size": 3},
    "chunks of 7": {"max_step_tokens": 7, "max_num_seqs": 7},
    "chunks of 13, pages of 1": {"max_step_tokens": 13, "page_size": 1},
    "small pool, preempting": {"num_pages": 64, "page_size": 4, "max_model_len": 236},
    "one row": {"max_num_seqs": 1, "page_size": 1},
    "n-grams": {"speculation": "ngram"},
    "two ranks": {"tensor_parallel_size": 2},
    "host cache": {"num_pages": 60, "page_size": 4, "max_model_len": 232, "host_cache_gib": 0.01},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
async def test_ids_in_every_variant(seeing: Seeing, name: str) -> None:
    if name == "host cache" and seeing.case == "qwen3-5":
        pytest.skip("states of linear attention stay on the device")
    async with seeing.engine(**VARIANTS[name]) as engine:
        bring_whatever_there_is(engine)
        assert ids(await ask(engine)) == seeing.expected
        assert ids(await ask(engine)) == seeing.expected
        for chat, expected in zip(CHATS, seeing.expected):  # one after the other: each may begin in the cache
            assert ids(await ask(engine, [chat])) == [expected]
        if "preempting" in name:
            assert engine.stats().preemptions > 0
        if name == "host cache":
            assert engine.stats().cached_host_tokens > 0


async def test_images_side_by_side(seeing: Seeing) -> None:
    """The same image twice, and two images in both orders: one after the other, so that each may begin in the cache."""
    one, two = picture(24, 24, 1), picture(24, 24, 2)
    text = words(9, 10)
    chats: list[Chat] = [[one, one, text], [one, two, text], [two, one, text], [one, text], [two, two, one, text]]
    async with seeing.engine(page_size=1) as engine:
        for chat in chats:
            prompt = await engine.encode_chat(message(chat))
            [found] = await ask(engine, [chat])
            assert found.token_ids == answer(seeing.case, seeing.model, prompt.token_ids, chat)
        assert computed(engine) == 2


@pytest.mark.slow
async def test_aborted_requests_leave_nothing_behind(seeing: Seeing) -> None:
    rng = random.Random(3)
    async with seeing.engine(max_step_tokens=9, max_num_seqs=4, page_size=4, num_pages=70, max_model_len=236) as engine:
        for _ in range(40):
            stream = await engine.submit_chat(message(rng.choice(CHATS)), max_tokens=NEW, **GREEDY)
            await asyncio.sleep(rng.random() * 0.03)
            stream.abort()
        await idle(engine)
        assert ids(await ask(engine)) == seeing.expected
        await idle(engine)


async def test_choices_fork_from_one_prompt(seeing: Seeing) -> None:
    async with seeing.engine(page_size=4) as engine:
        [answer] = await ask(engine, CHATS[:1], n=3)
        assert [choice.token_ids for choice in answer.choices] == [seeing.expected[0]] * 3

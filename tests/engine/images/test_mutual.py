"""Answers of models whose image tokens also attend to later ones of the image are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

import aengine
from aengine.config import EngineConfig
from aengine.model.config import ModelConfig
from aengine.runtime.startup.images import choose_images
from tests.engine.images.seeing import CHATS, Seeing, ask, computed, make_seeing, message

pytestmark = pytest.mark.anyio

IMAGE = {"gemma3": 16, "gemma4-plain": 140}  # the most tokens of an image


@pytest.fixture(scope="module", params=IMAGE)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return make_seeing(request.param, tmp_path_factory.mktemp(request.param))


async def check(seeing: Seeing, engine: aengine.Engine) -> None:
    assert engine.no_images == ""
    for _ in range(2):
        assert [one.token_ids for one in await ask(engine)] == seeing.expected
    for chat, expected in zip(CHATS, seeing.expected):  # one after the other: each may begin in the cache
        [one] = await ask(engine, [chat])
        assert one.token_ids == expected


async def test_ids_are_those_of_transformers(seeing: Seeing) -> None:
    async with seeing.engine(page_size=4) as engine:
        await check(seeing, engine)
        assert computed(engine) == 6


VARIANTS: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1},
    "no prefix cache": {"prefix_cache": False, "lookahead": False},
    "few window pages": {"page_size": 4, "window_context": 512},
    "n-grams": {"speculation": "ngram", "page_size": 3},
    "two ranks": {"tensor_parallel_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
async def test_ids_in_every_variant(seeing: Seeing, name: str) -> None:
    async with seeing.engine(**VARIANTS[name]) as engine:
        await check(seeing, engine)


@pytest.mark.slow
@pytest.mark.parametrize("more", [2, 5, 40])
async def test_chunks_end_before_or_after_an_image(seeing: Seeing, more: int) -> None:
    """A step has hardly more room than for an image."""
    step = IMAGE[seeing.case] + more
    async with seeing.engine(page_size=4, max_num_seqs=2, max_step_tokens=step, max_mixed_tokens=8) as engine:
        await check(seeing, engine)


@pytest.mark.slow
async def test_sequences_that_are_preempted(seeing: Seeing) -> None:
    pages = 24 if seeing.case == "gemma3" else 260  # all layers of gemma3 have windows
    async with seeing.engine(
        page_size=4, num_pages=pages, max_model_len=240 if seeing.case == "gemma3" else 520
    ) as engine:
        await check(seeing, engine)
        assert engine.stats().preemptions > 0


async def test_a_cached_prefix_may_end_within_an_image(seeing: Seeing) -> None:
    """Its keys and values were computed with the whole image, and the rest sees all of it."""
    chat, other = CHATS[1], [*CHATS[1][:1], "w20 w21"]  # both begin with the image
    async with seeing.engine(page_size=16 if seeing.case == "gemma4-plain" else 3) as engine:
        await ask(engine, [other])
        prompt = await engine.encode_chat(message(chat))
        assert prompt.images is not None
        image = prompt.images.images[0]
        tree: Any = engine._ready().scheduler.memory.tree
        cut = (image.start + image.end) // 2 // tree.page_size * tree.page_size
        assert image.start < cut < image.end
        real = tree.match
        tree.match = lambda ids, salt: real(ids[:cut], salt)
        [one] = await ask(engine, [chat])
        assert one.usage.cached_tokens == cut
        assert one.token_ids == seeing.expected[1]


def test_a_short_step_serves_text_alone(seeing: Seeing) -> None:
    config, model = EngineConfig(model=str(seeing.folder)), ModelConfig.from_folder(seeing.folder)
    image = IMAGE[seeing.case]
    short = choose_images(config, model, seeing.folder, image - 1)
    assert f"hold the {image} tokens of an image" in short.no_images
    assert choose_images(config, model, seeing.folder, image).sees


async def test_the_step_is_long_enough_by_default(seeing: Seeing) -> None:
    async with seeing.engine(max_num_seqs=500) as engine:
        assert engine._ready().runtime.max_step_tokens == 500 + IMAGE[seeing.case]

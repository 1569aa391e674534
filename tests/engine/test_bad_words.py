"""bad_words end to end, on the demo model."""

from __future__ import annotations

import pytest

import aengine
from aengine.errors import InvalidRequestError

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module", autouse=True)
def demo() -> None:
    """The whole demo model, because these tests check its text."""


PROMPT = "The capital of France is"


@pytest.mark.parametrize("lookahead", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_a_word_is_not_written(lookahead: bool) -> None:
    async with aengine.Engine(
        device="cpu", max_num_seqs=8, kv_cache_gib=0.05, progress=False, lookahead=lookahead
    ) as engine:
        free = await engine.complete(PROMPT, max_tokens=24, temperature=0)
        words = [" Paris", "France", "country"]  # each is banned with and without a space in front
        held = await engine.complete(PROMPT, max_tokens=24, temperature=0, bad_words=words)
        assert all(word.strip() in free.text for word in words)
        for word in words:
            assert word.strip() not in held.text
        phrase = engine.tokenizer.decode(free.token_ids[:4])  # a sequence of several tokens
        other = await engine.complete(PROMPT, max_tokens=12, temperature=0, bad_words=[phrase])
        assert other.token_ids[:3] == free.token_ids[:3]
        assert other.token_ids[3] != free.token_ids[3]


async def test_siblings_and_others_of_the_batch(engine: aengine.Engine) -> None:
    held = await engine.complete(PROMPT, max_tokens=12, temperature=0.7, n=4, bad_words=["Paris"], seed=1)
    assert all("Paris" not in choice.text for choice in held.choices)


PARIS = ["P", "Pa", "Par", "Paris"]  # every token with which it may begin


async def test_a_grammar_and_bad_words_hold_together(engine: aengine.Engine) -> None:
    form = aengine.Structured(choice=("Paris", "London"))
    free, held = (
        await engine.complete(PROMPT, max_tokens=8, temperature=0, structured=form),
        await engine.complete(PROMPT, max_tokens=8, temperature=0, structured=form, bad_words=PARIS),
    )
    assert (free.text, held.text) == ("Paris", "London")


async def test_what_is_refused(engine: aengine.Engine) -> None:
    cases: list[list[str]] = [["x"] * 257, [""], ["  "], ["ü" * 129], ["𒀀" * 33], [3]]
    for words in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.submit(PROMPT, bad_words=words)
        assert caught.value.param == "bad_words"

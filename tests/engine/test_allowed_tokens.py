"""allowed_token_ids end to end, on the demo model."""

from __future__ import annotations

import pytest

import aengine
from aengine.errors import InvalidRequestError

pytestmark = pytest.mark.anyio

PROMPT = "The capital of France is"


async def test_siblings_draw_only_what_is_allowed_and_others_what_they_like(engine: aengine.Engine) -> None:
    free = await engine.complete(PROMPT, max_tokens=8, temperature=0)
    ids = list(range(200, 240))
    held = await engine.complete(
        PROMPT, max_tokens=24, n=4, seed=1, temperature=2, allowed_token_ids=ids, logprobs=1, presence_penalty=1
    )
    for choice in held.choices:
        assert set(choice.token_ids) <= set(ids)
        assert (len(choice.token_ids), choice.finish_reason) == (24, "length")  # no end token is allowed
        assert choice.logprobs is not None
        assert choice.logprobs[0].top[0].token_id == free.token_ids[0]  # of the raw distribution
    assert len({choice.token_ids for choice in held.choices}) == 4
    assert (await engine.complete(PROMPT, max_tokens=8, temperature=0)).token_ids == free.token_ids


async def test_an_end_that_is_allowed_comes(engine: aengine.Engine) -> None:
    end = engine.tokenizer.eos_token_id
    assert end is not None
    done = await engine.complete(PROMPT, allowed_token_ids=(end,), max_tokens=9)
    assert (done.token_ids, done.finish_reason) == ((end,), "stop")


async def test_what_is_refused(engine: aengine.Engine) -> None:
    cases: list[object] = [[], [10**7], [-1], "12", 5, [True]]
    for ids in cases:
        with pytest.raises(InvalidRequestError) as caught:
            await engine.submit(PROMPT, allowed_token_ids=ids)
        assert caught.value.param == "allowed_token_ids"

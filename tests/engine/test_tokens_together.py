"""Steps that bring several tokens of a sequence: the same output as one token a step, in fewer fragments."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx2
import msgspec
import pytest

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.requests.structured import Structured
from aengine.types import Completion
from tests.engine.conftest import idle
from tests.engine.holding_back import TOGETHER, HoldingBack
from tests.http.serving import hosting, parse_events

pytestmark = pytest.mark.anyio

KNOBS: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 8,
    "kv_cache_gib": 0.1,
    "speculation": "off",
    "progress": False,
}
PROMPT = "The capital of France is"


@pytest.fixture
async def engine() -> AsyncIterator[aengine.Engine]:
    """An engine that computes one token a step."""
    async with aengine.Engine(**KNOBS) as engine:
        yield engine
        await idle(engine)


@pytest.fixture
async def drafting(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[aengine.Engine]:
    """An engine whose commits bring several tokens of a sequence. At the end, every page is accounted for."""
    monkeypatch.setattr("aengine.engine.loaded.Scheduler", HoldingBack)
    async with aengine.Engine(**KNOBS) as engine:
        yield engine
        await idle(engine)


def content(completion: Completion) -> Any:
    """Return everything but the request's id and the number of cached tokens."""
    plain = msgspec.to_builtins(completion)
    del plain["id"], plain["usage"]["cached_tokens"]
    return plain


WHOLE: dict[str, Any] = {"max_tokens": 21, "temperature": 0, "ignore_eos": True}
WORDS = Structured(regex="[a-z]{9}( [a-z]{3}){2}")
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": WHOLE,
    "logprobs": WHOLE | {"logprobs": 3},
    "prompt logprobs": WHOLE | {"prompt_logprobs": 2},
    "several choices": WHOLE | {"temperature": 1.0, "seed": 5, "n": 3},
    "a grammar": {"max_tokens": 30, "temperature": 1.0, "seed": 6, "structured": WORDS},
}


@pytest.mark.parametrize("params", REQUESTS.values(), ids=REQUESTS.keys())
async def test_the_output_is_the_same(engine: aengine.Engine, drafting: aengine.Engine, params: dict[str, Any]) -> None:
    expected = await engine.complete(PROMPT, **params)
    assert content(await drafting.complete(PROMPT, **params)) == content(expected)


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stop_string_ends_the_output_at_any_token_of_a_step(
    engine: aengine.Engine, drafting: aengine.Engine, include_stop: bool
) -> None:
    whole = await engine.complete(PROMPT, **WHOLE)
    texts = [engine.tokenizer.decode(whole.token_ids[:count]) for count in range(len(whole.token_ids))]
    for before, after in pairwise(texts[2 : 2 * TOGETHER + 3]):
        params = WHOLE | {"stop": [after[len(before) :]], "include_stop": include_stop, "logprobs": 0}
        expected = await engine.complete(PROMPT, **params)
        assert expected.choices[0].stop_string
        assert content(await drafting.complete(PROMPT, **params)) == content(expected)


async def test_a_stop_token_ends_the_output_in_the_middle_of_a_step(
    engine: aengine.Engine, drafting: aengine.Engine
) -> None:
    whole = await engine.complete(PROMPT, **WHOLE)
    for stop in dict.fromkeys(whole.token_ids[1 : 2 * TOGETHER]):
        params = WHOLE | {"stop_token_ids": [stop]}
        expected = await engine.complete(PROMPT, **params)
        assert content(await drafting.complete(PROMPT, **params)) == content(expected)


async def test_the_tokens_of_a_step_are_one_fragment(drafting: aengine.Engine) -> None:
    fragments = [fragment async for fragment in drafting.generate(PROMPT, **WHOLE, logprobs=0)]
    sizes = [len(fragment.token_ids) for fragment in fragments]
    assert sizes == [1, *[TOGETHER] * 5]
    assert [len(fragment.logprobs or ()) for fragment in fragments] == sizes


async def test_every_token_of_a_step_is_in_the_histograms(drafting: aengine.Engine) -> None:
    await drafting.complete(PROMPT, **WHOLE)
    seen = drafting.latencies
    assert sum(seen.first_token.counts) == 1
    assert sum(seen.inter_token.counts) == WHOLE["max_tokens"] - 1
    assert 0 < seen.inter_token.total <= seen.decode.total
    assert seen.mean_inter_token.total == pytest.approx(seen.decode.total / (WHOLE["max_tokens"] - 1))


async def test_a_client_that_leaves_ends_its_request(drafting: aengine.Engine) -> None:
    async for fragment in drafting.generate(PROMPT, **WHOLE):
        if len(fragment.token_ids) > 1:
            break
    async with asyncio.timeout(30):
        await idle(drafting)


async def streamed(engine: aengine.Engine, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of one streamed answer."""
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: _Entered(engine))
    async with hosting(app) as (port, _), httpx2.AsyncClient(timeout=30, trust_env=False) as client:
        url = f"http://127.0.0.1:{port}"
        while (await client.get(f"{url}/ready")).status_code != 200:
            pass
        return parse_events((await client.post(url + path, json={**body, "stream": True})).text)


class _Entered:
    """An engine that the test has entered already, as the application expects it."""

    def __init__(self, engine: aengine.Engine) -> None:
        self._engine = engine

    async def __aenter__(self) -> aengine.Engine:
        return self._engine

    async def __aexit__(self, *error: object) -> None:
        return None


async def test_the_tokens_of_a_step_are_one_event(drafting: aengine.Engine) -> None:
    whole = await drafting.complete(PROMPT, **WHOLE)
    body = WHOLE | {"prompt": PROMPT, "logprobs": 1, "return_token_ids": True}
    events = await streamed(drafting, "/v1/completions", body)
    assert events.pop() == "[DONE]"
    choices = [event["choices"][0] for event in events if event["choices"]]
    assert [len(choice["token_ids"]) for choice in choices] == [1, *[TOGETHER] * 5]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [1, *[TOGETHER] * 5]
    assert "".join(choice["text"] for choice in choices) == whole.text

"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aengine.errors import QueueFullError
from aengine.http.openai import completions as prompts
from tests.http.fake_engine import CACHED_TOKENS, WORDS, FakeEngine, recital
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"


async def test_answers_at_once_by_default() -> None:
    async with serving() as server:
        answer = (await server.post(PATH, model="fake", prompt="a b c", max_tokens=2)).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "object": "text_completion",
        "model": "fake",
        "choices": [{"index": 0, "text": WORDS[0] + WORDS[1], "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
        },
    }


async def test_16_tokens_by_default() -> None:
    async with serving() as server:
        await server.post(PATH, prompt="a")
        assert server.engine.submitted[0].params.max_tokens == 16


async def test_streams() -> None:
    async with serving() as server:
        *chunks, done = await server.events(PATH, prompt="a", max_tokens=3, stream=True)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(WORDS[:3])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_is_last_on_request() -> None:
    async with serving() as server:
        *chunks, usage, _ = await server.events(
            PATH, prompt="a", max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
    assert [chunk["usage"] for chunk in chunks] == [None, None, None]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3


async def test_logprobs() -> None:
    async with serving() as server:
        whole = (await server.post(PATH, prompt="a", max_tokens=2, logprobs=1)).json()
        first, second, _ = await server.events(PATH, prompt="a", max_tokens=2, logprobs=1, stream=True)
    expected = {
        "tokens": ["Paris", ", said"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"other0": -2.0, "Paris": -0.25}, {"other0": -2.0, ", said": -0.25}],
        "text_offset": [0, 5],
    }
    assert whole["choices"][0]["logprobs"] == expected
    for position, chunk in enumerate((first, second)):
        assert chunk["choices"][0]["logprobs"] == {name: [values[position]] for name, values in expected.items()}


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("a b", ["a b"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_prompts_in_four_spellings(prompt: Any, seen: list[Any]) -> None:
    async with serving() as server:
        answer = (await server.post(PATH, prompt=prompt, max_tokens=1, n=2)).json()
        assert [request.prompt for request in server.engine.submitted] == seen
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(seen)))
    assert answer["usage"]["completion_tokens"] == 2 * len(seen)


@pytest.mark.parametrize("prompt", [[], [1, "a"], ["a", [1]], [[]], ["a"] * 1025])
async def test_other_prompts_are_refused(prompt: Any) -> None:
    async with serving() as server:
        response = await server.post(PATH, prompt=prompt)
    if prompt == [[]]:  # well-formed; the engine refuses empty prompts
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"


async def test_several_prompts_stream_as_they_come() -> None:
    async with serving() as server:
        *chunks, usage, _ = await server.events(
            PATH, prompt=["a", "b"], max_tokens=2, stream=True, stream_options={"include_usage": True}
        )
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [WORDS[0] + WORDS[1]] * 2
    assert usage["usage"]["completion_tokens"] == 4


async def test_when_one_prompt_is_refused_all_are_given_up() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine) as server:
        original = engine.submit

        async def refuse_the_second(prompt: Any, params: Any = None, **options: Any) -> Any:
            if prompt == "b":
                raise QueueFullError("full")
            return await original(prompt, params, **options)

        engine.submit = refuse_the_second  # type: ignore[method-assign]
        response = await server.post(PATH, prompt=["a", "b"])
        stream = await engine.next_stream()
        assert response.status_code == 503
        assert stream.aborted.is_set()


async def test_when_one_prompt_fails_all_are_given_up() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine) as server:
        raw = await server.connect(PATH, prompt=["a", "b", "c"])
        streams = [await engine.next_stream() for _ in range(3)]
        streams[0].put(*recital(1, engine.submitted[0].params))
        streams[1].fail(QueueFullError("full"))
        await streams[2].aborted.wait()
        raw.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_echoed_characters_are_bounded(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_ECHO", 40)
    async with serving(FakeEngine(held=True)) as server:
        requested = {"prompt": ["abcde", "fgh", "ij"], "n": 4, "echo": True, "stream": stream}
        async with asyncio.timeout(30):
            refused = await server.post(PATH, **requested | {"prompt": ["abcde", "fghij", "k"]})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "echo"
        assert "repeat 44 characters and more, but an answer may repeat 40" in error["message"]
        for _ in range(2):  # of the prompts before it
            await (await server.engine.next_stream()).aborted.wait()
        taken = asyncio.create_task(server.post(PATH, **requested))
        for _ in range(3):
            await server.engine.next_stream()
        taken.cancel()

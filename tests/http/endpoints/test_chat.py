"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.fake_engine import WORDS
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello there"}]


async def test_answers_at_once_by_default() -> None:
    async with serving() as server:
        answer = (await server.post(PATH, model="fake", messages=HELLO)).json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(WORDS)},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["total_tokens"] == 8


async def test_streams_the_role_then_the_text() -> None:
    async with serving() as server:
        role, *chunks, usage, done = await server.events(
            PATH, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    assert done == "[DONE]"
    assert role["object"] == "chat.completion.chunk"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"content": word} for word in WORDS]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]
    assert usage["usage"]["completion_tokens"] == 6


async def test_several_choices_each_have_a_role() -> None:
    async with serving() as server:
        first, second, *chunks, _ = await server.events(PATH, messages=HELLO, stream=True, n=2, max_tokens=1)
    assert [first["choices"][0]["index"], second["choices"][0]["index"]] == [0, 1]
    assert [chunk["choices"][0]["index"] for chunk in chunks] == [0, 1]


async def test_logprobs() -> None:
    async with serving() as server:
        answer = (await server.post(PATH, messages=HELLO, logprobs=True, top_logprobs=1)).json()
        _, first, *_ = await server.events(PATH, messages=HELLO, logprobs=True, stream=True)
        refused = await server.post(PATH, messages=HELLO, top_logprobs=1)
    content = answer["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "Paris",
        "logprob": -0.25,
        "bytes": [80, 97, 114, 105, 115],
        "top_logprobs": [{"token": "other0", "logprob": -2.0, "bytes": [111, 116, 104, 101, 114, 48]}],
    }
    assert len(content) == len(WORDS)
    assert first["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert refused.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 3}, 4),
    ],
)
async def test_max_tokens(given: dict[str, int], expected: int | None) -> None:
    async with serving() as server:
        await server.post(PATH, messages=HELLO, **given)
        assert server.engine.submitted[0].params.max_tokens == expected


async def test_messages_reach_the_template_as_plain_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = [{"type": "function", "function": {"name": "f", "strict": True}}]  # the last is not the model's to know
    async with serving() as server:
        response = await server.post(PATH, messages=messages, tools=asked, chat_template_kwargs={"thinking": False})
        assert response.status_code == 200
        chat = server.engine.chats[0]
    messages[1]["content"] = "one two"
    assert chat.messages == messages
    assert chat.tools == tools
    assert chat.template_kwargs == {"thinking": False}

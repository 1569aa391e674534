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
    requested = [{"type": "function", "function": {"name": "f", "strict": True}}]  # the model does not see the last one
    async with serving() as server:
        response = await server.post(PATH, messages=messages, tools=requested, chat_template_kwargs={"thinking": False})
        assert response.status_code == 200
        chat = server.engine.chats[0]
    messages[1]["content"] = "one two"
    assert chat.messages == messages
    assert chat.tools == tools
    assert chat.template_kwargs == {"thinking": False}


@pytest.mark.parametrize(
    ("message", "reported"),
    [
        (
            {"content": [{"type": "refusal", "refusal": "I "}, {"type": "text", "text": "won't"}]},
            {"content": "I won't"},
        ),
        ({"content": None, "refusal": "No."}, {"content": "No."}),
        ({"content": "a", "refusal": None, "audio": None, "function_call": None, "annotations": []}, {"content": "a"}),
        ({"content": "a", "reasoning": "hm"}, {"content": "a", "reasoning": "hm"}),
    ],
)
async def test_messages_of_other_models_are_accepted(message: dict[str, Any], reported: dict[str, Any]) -> None:
    async with serving() as server:
        response = await server.post(PATH, messages=[{"role": "assistant", **message}, *HELLO])
        assert response.status_code == 200, response.text
        assert server.engine.chats[0].messages[0] == {"role": "assistant", **reported}


@pytest.mark.parametrize("name", ["fs.read", "mcp:server/tool", "a-b_c", "x" * 128])
async def test_calls_by_names_that_are_not_offered_here(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    async with serving() as server:
        response = await server.post(PATH, messages=[{"role": "assistant", "tool_calls": [call]}, *HELLO])
        assert response.status_code == 200, response.text
        assert server.engine.chats[0].messages[0]["tool_calls"] == [call]


@pytest.mark.parametrize("name", ["", "/think", ".a", "a b", "a>", "|im_end|", "x" * 129, "a\n"])
async def test_and_by_names_that_could_become_control(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    async with serving() as server:
        response = await server.post(PATH, messages=[{"role": "assistant", "tool_calls": [call]}, *HELLO])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].tool_calls[0].function.name"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"audio": {"id": "a"}}, "messages[0].audio"),
        ({"content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"content": [{"type": "thing"}]}, "messages[0].content[0].type"),
    ],
)
async def test_unsupported_message_fields_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    async with serving() as server:
        response = await server.post(PATH, messages=[{"role": "assistant", **message}, *HELLO])
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")

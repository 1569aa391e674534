"""Whole answers of `/v1/chat/completions` as sent over the wire. These tests change whenever clients see a change."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.answer.parser import AnswerFormat
from aengine.types import Fragment, TokenLogprob, TopLogprob, Usage
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving
from tests.http.wire import NOW
from tests.http.wire_requests import ALL_THE_TIME, CHAT, HELLO, WITH_USAGE, held, post, streamed, usage

pytestmark = pytest.mark.anyio


def chat_usage(prompt: int, completion: int) -> dict[str, Any]:
    return {**usage(prompt, completion), "completion_tokens_details": {"reasoning_tokens": 0}}


WHOLE_CHAT = {"id": "chatcmpl-ID", "object": "chat.completion", "created": NOW, "model": "fake"}
CHUNK = {**WHOLE_CHAT, "object": "chat.completion.chunk"}


def delta(*, reason: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {**CHUNK, "choices": [{"index": 0, "delta": fields, "logprobs": logprobs, "finish_reason": reason}]}


async def test_chats() -> None:
    body = {**HELLO, "max_tokens": 2}
    async with serving() as server:
        message = {"role": "assistant", "content": "Paris, said"}
        assert await post(server, CHAT, **body) == {
            **WHOLE_CHAT,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}],
            "usage": chat_usage(2, 2),
        }
        chunks = [
            delta(role="assistant", content=""),
            delta(content="Paris"),
            delta(content=", said", reason="length"),
        ]
        assert await streamed(server, CHAT, **body, stream=True) == chunks
        no: dict[str, Any] = {"usage": None}
        last = {**CHUNK, "choices": [], "usage": chat_usage(2, 2)}
        assert await streamed(server, CHAT, **body, **WITH_USAGE) == [*(chunk | no for chunk in chunks), last]
        so_far = [
            {"usage": {"prompt_tokens": 2, "completion_tokens": count, "total_tokens": 2 + count}}
            for count in (0, 1, 2)
        ]
        all_the_time = [chunk | count for chunk, count in zip(chunks, so_far, strict=True)]
        assert await streamed(server, CHAT, **body, **ALL_THE_TIME) == [*all_the_time, last]


async def test_chats_with_logprobs_of_parts_of_characters() -> None:
    """A part of a character is shown as U+FFFD with its bytes. A U+FFFD of the model has its own bytes."""
    part = TokenLogprob(5, "\ufffd", -0.25, (TopLogprob(4, "\ufffd", -2.0), TopLogprob(6, "é", -3.0)))
    fragments = Fragment("", (5,), (part,)), Fragment("é", (6,), None, "stop", Usage(2, 2, 0))
    entry = {
        "token": "\ufffd",
        "logprob": -0.25,
        "bytes": list(b"xxxxx"),  # from FakeTokenizer
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -2.0, "bytes": list(b"xxxx")},
            {"token": "é", "logprob": -3.0, "bytes": [0xC3, 0xA9]},
        ],
    }
    requested = {**HELLO, "logprobs": True, "top_logprobs": 2}
    (choice,) = (await held(CHAT, *fragments, **requested))["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": "é"},
        "logprobs": {"content": [entry]},
        "finish_reason": "stop",
    }
    assert await held(CHAT, *fragments, **requested, stream=True) == [
        delta(role="assistant", content=""),
        delta(
            content="é", logprobs={"content": [entry]}, reason="stop"
        ),  # both were waiting, so they are sent together
    ]


THINKS_AND_CALLS = AnswerFormat(calls="hermes", thoughts=True)
SAID = ["<think>", "\nI call.", "\n</think>", "\n\nI ", "look.\n", "<tool_call>", '\n{"name": "f", ']
SAID += ['"arguments": {"a": 1}', "}\n</tool_call>", "\n<tool_call>", '{"name": "f", "arguments": {}}</tool_call>']
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}


async def test_chats_with_a_thought_and_calls() -> None:
    engine = FakeEngine()
    engine.words, engine.answer_format = SAID, THINKS_AND_CALLS
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number, arguments in ((1, '{"a": 1}'), (2, "{}"))
    ]
    message = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "I call.",
        "reasoning": "I call.",
        "tool_calls": calls,
    }
    async with serving(engine) as server:
        assert await post(server, CHAT, **HELLO, **TOOLS) == {
            **WHOLE_CHAT,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls"}],
            "usage": chat_usage(2, len(SAID)),
        }
        events = await streamed(server, CHAT, **HELLO, **TOOLS, stream=True)

    def begun(index: int) -> dict[str, Any]:
        head = {"id": f"call_{index + 1}", "type": "function", "function": {"name": "f", "arguments": ""}}
        return delta(tool_calls=[{"index": index, **head}])

    def more(index: int, arguments: str) -> dict[str, Any]:
        return delta(tool_calls=[{"index": index, "function": {"arguments": arguments}}])

    assert events == [
        delta(role="assistant", content=None),
        delta(reasoning_content="I call.", reasoning="I call."),
        delta(content="I"),
        delta(content=" look."),
        begun(0),
        more(0, '{"a": 1}'),
        begun(1),
        more(1, "{}"),
        delta(reason="tool_calls"),
    ]

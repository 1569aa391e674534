"""Input items as messages for the chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from aengine.http.fields.images import MediaRules
from aengine.http.responses.bodies import InputItem
from aengine.http.responses.input import encode_thought, messages_of

TEXT_ONLY = MediaRules("it reads text only", in_results=False)


def read(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return asyncio.run(messages_of(instructions, msgspec.convert(items, list[InputItem]), TEXT_ONLY))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(*names: str) -> list[dict[str, Any]]:
    return [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in names]


def call(name: str) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": "fc",
        "call_id": name,
        "name": name,
        "arguments": "{}",
        "status": "completed",
    }


def result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": f"of {name}"}


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg", "status": "completed", "role": "assistant", "content": [part]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def test_messages_with_and_without_a_type() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert read(user("a"), {"type": "message", "role": "user", "content": parts}) == [user("a"), user("ab")]
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert read(refused) == [said("no")]


def test_instructions_at_the_beginning_are_one_message() -> None:
    developer, system = {"role": "developer", "content": "b"}, {"role": "system", "content": "c"}
    assert read(developer, system, user("x"), system, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc"},
        user("x"),
        system,
    ]
    assert read(developer, user("x")) == [developer, user("x")]


def test_the_items_of_one_answer_are_one_message() -> None:
    assert read(thought("t"), message("m"), call("f"), call("g"), result("f"), result("g"), message("n")) == [
        said("m", reasoning_content="t", tool_calls=called("f", "g")),
        {"role": "tool", "tool_call_id": "f", "content": "of f"},
        {"role": "tool", "tool_call_id": "g", "content": "of g"},
        said("n"),
    ]
    assert read(message("m"), call("f"), message("n")) == [said("mn", tool_calls=called("f"))]


def test_another_answer_is_another_message() -> None:
    assert read(message("m"), message("n")) == [said("m"), said("n")]
    assert read(thought("t"), call("f"), thought("u"), call("g")) == [
        said(None, reasoning_content="t", tool_calls=called("f")),
        said(None, reasoning_content="u", tool_calls=called("g")),
    ]
    assert read(message("m"), user("x"), call("f")) == [said("m"), user("x"), said(None, tool_calls=called("f"))]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}], "encrypted_content": encode_thought("b")}, "a"),
        ({"content": [], "encrypted_content": encode_thought("bé")}, "bé"),
        ({"encrypted_content": encode_thought("b"), "summary": [{"type": "summary_text", "text": "c"}]}, "b"),
        ({"encrypted_content": "gAAAAA of another server", "summary": [{"type": "summary_text", "text": "c"}]}, "c"),
        ({"summary": [{"type": "summary_text", "text": "c"}, {"type": "summary_text", "text": "d"}]}, "c\n\nd"),
    ],
)
def test_a_thought_is_its_content_encrypted_content_or_summary(item: dict[str, Any], text: str) -> None:
    assert read({"type": "reasoning", "id": "rs", **item}, message("m")) == [said("m", reasoning_content=text)]


def test_a_thought_of_which_nothing_is_left() -> None:
    assert read({"type": "reasoning", "id": "rs", "summary": []}, message("m")) == [said("m")]


@pytest.mark.parametrize(
    "item",
    [
        lambda text: {"role": "system", "content": text},
        thought,
        message,  # after a call, as part of one answer
    ],
    ids=["instructions", "thoughts", "texts"],
)
def test_the_time_grows_with_the_items_not_with_their_square(item: Callable[[str], dict[str, Any]]) -> None:
    text = "x" * 2000
    items = msgspec.convert(
        [call("f"), *(item(text) for _ in range(4000))][item.__name__ != "message" :], list[InputItem]
    )
    started = time.thread_time()
    messages = asyncio.run(messages_of("i", items, TEXT_ONLY))
    assert time.thread_time() - started < 0.5  # 4,000 copies of up to 8 MB take seconds
    assert sum(len(value) for value in messages[-1].values() if isinstance(value, str) and "x" in value) >= 8_000_000


def test_other_tasks_run_while_a_long_conversation_is_read() -> None:
    async def read_beside() -> int:
        items = [InputItem(role="user", content="x") for _ in range(20_000)]
        task = asyncio.create_task(messages_of(None, items, TEXT_ONLY))
        turns = 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(read_beside()) > 15

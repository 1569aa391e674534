"""Streamed answers: the order of events, and that they give the same message as a whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import ServerConfig
from aengine.http.anthropic.answer import AnswerPlan, content_blocks, message_body
from aengine.http.anthropic.events import MessageEventEncoder
from aengine.http.fields.messages import Function, Tool
from aengine.http.fields.tools import ToolUse
from aengine.http.streams import sse
from aengine.text.answer.deltas import CallDelta, ContentDelta, ReasoningDelta
from aengine.text.answer.parser import AnswerFormat
from aengine.text.reading import AnswerReading
from aengine.types import Choice, Completion, FinishReason, Fragment, Usage
from tests.http.fake_engine import FakeStream

TOOL = Tool(type="function", function=Function(name="look", parameters={"type": "object"}))
TOOLS = ToolUse([TOOL], [TOOL], forced=False, parallel=True, place="tools[{}]".format)
READING = AnswerReading(ServerConfig(), AnswerFormat(calls="hermes", thoughts=True), TOOLS.rules)
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "%s"}}\n</tool_call>'
ALL_ERRORS = (
    "",
    "plain text",
    "<think>\nhm\n</think>\n\ntext",
    "<think>\nhm\n</think>\n\n" + CALL % "a",
    "<think>never done",
    "before\n" + CALL % "a" + "\n" + CALL % "b",
    CALL % "a" + "\nafter",
    "<think>\nhm</think>x " + CALL % "é👋\\n" + " y " + CALL % "b" + " z",
    '<tool_call>\n{"name": "look", "arguments": {"at": ',  # cut short
    '<tool_call>\n{"name": "look", "arguments": [1]}\n</tool_call>',
    "<tool_call>no call</tool_call>",
)


def plan(**fields: Any) -> AnswerPlan:
    return AnswerPlan(**{"id": "msg_1", "model": "m", "max_tokens": 1000, "shows_thoughts": True} | fields)


def parse(events: bytes) -> list[dict[str, Any]]:
    """Return the payloads, and check that each event's name is its type."""
    payloads = []
    for event in filter(None, events.decode().split("\n\n")):
        name, _, data = event.partition("\n")
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        payloads.append(payload)
    return payloads


def streamed(
    pieces: list[str], plan: AnswerPlan, reason: FinishReason = "stop", stop_string: str | None = None
) -> list[dict[str, Any]]:
    usage = Usage(9, len(pieces), 4)
    last = len(pieces) - 1
    fragments = [
        Fragment(text, (place,), None, reason, usage, stop_string=stop_string)
        if place == last
        else Fragment(text, (place,))
        for place, text in enumerate(pieces)
    ]
    encoder = MessageEventEncoder(plan, FakeStream("msg_1", 9, False), READING.reader(False, lambda token_id: b"x"))
    return parse(encoder.opening() + b"".join(map(encoder.event, fragments)) + encoder.closing(usage))


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes from the events, and check their order."""
    start, ping, *middle, ending, stop = events
    assert (start["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    open_block: dict[str, Any] | None = None
    for event in middle:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        match event:
            case {"type": "content_block_start", "content_block": block}:
                assert open_block is None
                open_block = block | ({"input": ""} if block["type"] == "tool_use" else {})
                message["content"].append(open_block)
            case {"type": "content_block_stop"}:
                assert open_block is not None
                if open_block["type"] == "tool_use":
                    open_block["input"] = read_input(open_block["input"])
                open_block = None
            case {"type": "content_block_delta", "delta": {"type": kind, **delta}}:
                assert open_block is not None
                ((name, piece),) = delta.items()
                assert kind == ("input_json_delta" if name == "partial_json" else f"{name}_delta")
                assert piece != ""
                open_block["input" if name == "partial_json" else name] += piece
    assert open_block is None
    assert ending["type"] == "message_delta"
    return message | ending["delta"] | {"usage": ending["usage"]}


def read_input(text: str) -> Any:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def whole(text: str, plan: AnswerPlan, tokens: int, reason: FinishReason = "stop") -> dict[str, Any]:
    choice = Choice(0, text, tuple(range(tokens)), reason)
    reader = READING.reader(False, lambda token_id: b"x")
    body = asyncio.run(message_body(plan, Completion("msg_1", (choice,), Usage(9, tokens, 4)), reader))
    message: dict[str, Any] = json.loads(sse.encode(body))
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    for block in message["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("call_")
    return message


@pytest.mark.hypothesis
@given(st.sampled_from(ALL_ERRORS), st.data())
def test_events_make_the_whole_message(text: str, data: st.DataObject) -> None:
    """For any pieces of the text, and with and without thoughts."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    requested = plan(shows_thoughts=data.draw(st.booleans()))
    made = without_ids(joined(streamed(pieces, requested)))
    assert made == without_ids(whole(text, requested, len(pieces)))
    if not requested.shows_thoughts:
        assert all(block["thinking"] == "" for block in made["content"] if block["type"] == "thinking")


def test_a_thought_is_signed_and_a_call_follows() -> None:
    kinds = [
        (event["type"], (event.get("delta") or event.get("content_block") or {}).get("type"))
        for event in streamed(["<think>", "hm", "</think>", "\n\n", CALL % "a"], plan())
    ]
    assert kinds == [
        ("message_start", None),
        ("ping", None),
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", "tool_use"),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]


@pytest.mark.parametrize(
    ("text", "reason", "stop_string", "max_tokens", "stop_reason"),
    [
        ("a", "stop", None, 9, "end_turn"),
        (CALL % "a", "stop", None, 9, "tool_use"),
        ("a", "stop", "END", 9, "stop_sequence"),
        (CALL % "a", "stop", "END", 9, "stop_sequence"),
        ("a", "length", None, 1, "max_tokens"),
        (CALL % "a", "length", None, 1, "max_tokens"),
        ("a", "length", None, 2, "model_context_window_exceeded"),
    ],
)
def test_why_it_ended(
    text: str, reason: FinishReason, stop_string: str | None, max_tokens: int, stop_reason: str
) -> None:
    *_, ending, _ = streamed([text], plan(max_tokens=max_tokens), reason, stop_string)
    matched = stop_string if stop_reason == "stop_sequence" else None
    assert ending["delta"] == {"stop_reason": stop_reason, "stop_sequence": matched}
    assert ending["usage"] == {
        "input_tokens": 5,  # without cached tokens
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 1,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_max_tokens_0_shows_nothing() -> None:
    """`max_tokens: 0` fills the cache. The generated token is neither shown nor counted."""
    _, _, ending, _ = streamed(["x"], plan(max_tokens=0), "length")
    assert ending["delta"]["stop_reason"] == "max_tokens"
    assert ending["usage"]["output_tokens"] == 0
    assert whole("x", plan(max_tokens=0), 1, "length")["content"] == []


def test_runs_of_one_kind_are_a_block() -> None:
    deltas = [
        ReasoningDelta("a"),
        ReasoningDelta("b"),
        ContentDelta("c"),
        CallDelta(0, "", "call_1", "look"),
        CallDelta(0, "{"),
        CallDelta(0, "}"),
        CallDelta(1, "{}", "call_2", "look"),
        ContentDelta("d"),
    ]
    kinds = [type(block).__name__ for block in content_blocks(deltas, shows_thoughts=True)]
    assert kinds == ["ThinkingBlock", "TextBlock", "ToolUseBlock", "ToolUseBlock", "TextBlock"]

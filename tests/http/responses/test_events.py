"""For every text in any pieces, the events are in order and give the whole response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import ServerConfig
from aengine.http.responses.answer import ResponseHead
from aengine.http.responses.bodies import ResponsesRequest, ResponsesTool
from aengine.http.responses.events import ResponseEventEncoder, response_body
from aengine.http.responses.items import Output
from aengine.http.responses.tools import read_tools
from aengine.http.streams.document import document
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.text.answer.reader import Reader
from aengine.text.reading import AnswerReading
from aengine.types import Choice, Completion, FinishReason, Fragment, Usage
from tests.http.responses.streams import check_order, parse, without_ids

F, P = ResponsesTool(type="function", name="f"), ResponsesTool(type="custom", name="p")
MESSAGES = (
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    *("<|channel|>commentary to=functions.f <|constrain|>json<|message|>", " to=functions.p<|channel|>commentary"),
    *("<|message|>", "<|end|>", "<|start|>assistant", "<|start|>", "<|call|>", "<|return|>", "<|channel|>"),
    *('{"a": 1}', '{"input": "', '"}', "a", " é👋", "\n", '"', "\\", "\\ud83d"),
)
BODY = ResponsesRequest(input="a", tools=[F, P])
PIECES = (
    *(
        "<think>",
        "</think>",
        "\n",
        "a",
        " é👋",
        '"',
        "\\",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {',
    ),
    *(
        "}}",
        '{"a": 1',
        '{"name": "p", "arguments": {"input": "',
        '"}}',
        "\\u00e9",
        "\\ud83d",
        '{"name": "g", "arguments": {}}',
    ),
)


QWEN, GPT_OSS = AnswerFormat(calls="hermes", thoughts=True), AnswerFormat(harmony=True, thoughts=True)


def parts(form: AnswerFormat, opens_thought: bool, summaries: bool) -> tuple[ResponseHead, Output, Reader]:
    tools = read_tools(BODY)
    reading = AnswerReading(ServerConfig(), form, tools.use.rules)
    head = ResponseHead("resp_1", "m", BODY, SamplingParams(), stored=False)
    reader = reading.reader(opens_thought, lambda token_id: b"x")
    return head, Output(summaries=summaries, encrypted=summaries, called=tools.called), reader


def streamed(texts: Sequence[str], reason: FinishReason, usage: Usage, *form: Any) -> dict[str, Any]:
    head, output, reader = parts(*form)
    encoder = ResponseEventEncoder(head, output, reader)
    events = encoder.opening()
    for text in texts:
        events += encoder.event(Fragment(text, (1,)))
    events += encoder.event(Fragment("", (2,), finish_reason=reason))
    return check_order(parse((events + encoder.closing(usage)).decode()))


def whole(text: str, tokens: int, reason: FinishReason, usage: Usage, *form: Any) -> dict[str, Any]:
    head, output, reader = parts(*form)
    completion = Completion("r", (Choice(0, text, (1,) * tokens + (2,), reason),), usage)
    body = asyncio.run(response_body(head, completion, output, reader))
    response: dict[str, Any] = json.loads(b"".join(document(body)))
    return response


@pytest.mark.hypothesis
@given(
    st.lists(st.sampled_from(PIECES), max_size=16),
    st.sampled_from(["stop", "length", "abort", "error"]),
    st.booleans(),
    st.booleans(),
)
def test_the_events_make_the_whole_response(
    texts: list[str], reason: Any, opens_thought: bool, summaries: bool
) -> None:
    check_told_as_given(texts, reason, QWEN, opens_thought, summaries)


@pytest.mark.hypothesis
@given(st.lists(st.sampled_from(MESSAGES), max_size=16), st.sampled_from(["stop", "length", "abort"]), st.booleans())
def test_the_events_of_messages_in_channels_make_the_whole_response(
    texts: list[str], reason: Any, summaries: bool
) -> None:
    check_told_as_given(texts, reason, GPT_OSS, False, summaries)


def check_told_as_given(texts: list[str], reason: Any, *form: Any) -> None:
    usage = Usage(3, len(texts) + 1, 1)
    reported = streamed(texts, reason, usage, *form)
    given = whole("".join(texts), len(texts), reason, usage, *form)
    assert without_ids(reported) == without_ids(given)

"""Tools on `/v1/chat/completions`: the prompt and the answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aengine.config import ServerConfig
from aengine.http.openai.bodies import ChatRequest
from aengine.http.openai.chat import chat_body, tool_use
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat
from aengine.text.reading import AnswerReading
from aengine.types import Choice, Completion, Usage
from tests.http.fake_engine import FakeEngine
from tests.http.openai.tools import CALL, HELLO, PATH, QWEN, TOOLS, named, reader, saying, thought
from tests.http.serving import serving
from tests.text.cutting import read_fragments

pytestmark = pytest.mark.anyio

ALL = ["<think>", "\nI call.", "\n</think>", "\n\nI ", "look.\n", *CALL, "\n", *CALL]


async def message(engine: FakeEngine, **fields: Any) -> tuple[dict[str, Any], str]:
    """The message without the ids of its calls, and the finish reason."""
    async with serving(engine) as server:
        response = await server.post(PATH, **{"messages": HELLO, "tools": TOOLS, **fields})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    for call in choice["message"].get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return choice["message"], choice["finish_reason"]


F_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


async def test_a_thought_content_and_calls_in_one_answer() -> None:
    assert await message(saying(*ALL)) == (
        {"role": "assistant", "content": "I look.", **thought("I call."), "tool_calls": [F_CALL, F_CALL]},
        "tool_calls",
    )


async def test_without_content_it_is_null() -> None:
    assert await message(saying(*CALL)) == (
        {"role": "assistant", "content": None, "tool_calls": [F_CALL]},
        "tool_calls",
    )


async def test_an_answer_that_calls_nothing() -> None:
    assert await message(saying("a ", "<b>")) == ({"role": "assistant", "content": "a <b>"}, "stop")
    broken = ["<tool_call>", "\noops\n", "</tool_call>"]
    assert await message(saying(*broken)) == ({"role": "assistant", "content": "".join(broken)}, "stop")


async def test_an_incomplete_call() -> None:
    assert await message(saying(*CALL), max_tokens=3) == (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{"}}],
        },
        "length",
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("tokens", [1, 2])
async def test_the_beginning_of_a_call_is_no_text(choice: str, tokens: int) -> None:
    fields = {"tool_choice": choice, "max_tokens": tokens}
    assert await message(saying(*CALL), **fields) == ({"role": "assistant", "content": None}, "length")
    async with serving(saying(*CALL)) as server:
        _, *chunks, _ = await server.events(PATH, messages=HELLO, tools=TOOLS, stream=True, **fields)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{}]


def engine_params(reading: AnswerReading, opens_thought: bool = False, **fields: Any) -> SamplingParams:
    return reading.engine_params(SamplingParams(**fields), opens_thought)


def test_stop_strings_in_thoughts_and_calls() -> None:
    stop = ("city",)
    for choice, stops in (("auto", stop), ("required", ())):
        body = msgspec.convert({"messages": HELLO, "tools": TOOLS, "tool_choice": choice}, ChatRequest)
        reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules)
        assert engine_params(reading, stop=stop).stop == stops
    body = msgspec.convert({"messages": HELLO}, ChatRequest)
    reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules)
    assert engine_params(reading, stop=stop).unstopped == ("<think>", "</think>")
    assert engine_params(reading, True, stop=stop).unstopped == ("", "</think>")
    assert engine_params(reading, stop=stop, stop_in_thought=True).unstopped is None
    assert engine_params(reading).unstopped is None
    reading = AnswerReading(ServerConfig(reasoning="off"), QWEN, tool_use(body).rules)
    assert engine_params(reading, stop=stop).unstopped is None


@pytest.mark.parametrize(("behind", "reason"), [("1}}", "stop"), ("\n</tool", "tool_calls"), (" ok", "tool_calls")])
async def test_a_stop_string_within_a_call_is_no_reason_to_make_it(behind: str, reason: str) -> None:
    body = msgspec.convert({"messages": HELLO, "tools": TOOLS}, ChatRequest)
    whole = "".join([*CALL, " ok"])
    choice = Choice(0, whole[: whole.index(behind)], (), "stop", stop_string="x")
    reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules)
    found = await chat_body({}, Completion("x", (choice,), Usage(1, 1, 0)), [reader(reading)], None)
    assert found["choices"][0]["finish_reason"] == reason  # type: ignore[index]


def allowed(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


@pytest.mark.parametrize(
    ("more", "called"),
    [
        ({}, True),
        ({"tool_choice": allowed(TOOLS[:1])}, True),
        ({"tool_choice": allowed(TOOLS[1:])}, False),
        ({"tools": [named("f", strict=True, parameters={"type": "object", "properties": {}})]}, False),
    ],
)
def test_a_call_without_its_marker_is_read_if_no_schema_applies(more: dict[str, Any], called: bool) -> None:
    body = msgspec.convert({"messages": HELLO, "tools": TOOLS} | more, ChatRequest)
    reading = AnswerReading(ServerConfig(), AnswerFormat(calls="qwen3_coder"), tool_use(body).rules)
    text = "I look.\n<function=f>\n</function>\n</tool_call>"
    found = read_fragments(reader(reading), text)
    assert (found.content, len(found.calls)) == (("I look.", 1) if called else (text, 0))


async def test_calls_in_llamas_way() -> None:
    words = ['{"name": "f", ', '"parameters": {"a": 1}}']
    expected = {"role": "assistant", "content": None, "tool_calls": [F_CALL]}
    assert await message(saying(*words, form=AnswerFormat(calls="llama3"))) == (expected, "tool_calls")
    thinking = saying("<think>", "\nplan\n", "\n", *words, "\n", form=AnswerFormat(calls="llama3", thoughts=True))
    assert await message(thinking) == ({**expected, **thought("plan")}, "tool_calls")


WEATHER = named(
    "f", parameters={"type": "object", "properties": {"city": {"type": "string"}, "a": {"type": "integer"}}}
)
F_CITY = {"type": "function", "function": {"name": "f", "arguments": '{"city": "a <b>\\n", "a": 1}'}}


XML_END = "<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("mistral", ["[TOOL_CALLS]", "f", "[ARGS]", '{"city": "a <b>', '\\n", "a": 1}']),
        ("mistral_list", ["[TOOL_CALLS]", ' [{"name": "f", "arguments": {"city": "a <b>', '\\n", "a": 1}}', "]"]),
        ("pythonic", ["[f(", "city='a <b>", "\\n'", ",a=1", ")]"]),
        (
            "qwen3_coder",
            ["<tool_call>\n", "<function=f>\n<par", "ameter=city>\na ", "<b>\n", "\n</parameter>\n", XML_END],
        ),
    ],
)
async def test_calls_as_other_families_write_them(calls: Any, words: list[str]) -> None:
    engine = saying("I look. " if calls != "pythonic" else "", *words, form=AnswerFormat(calls=calls))
    async with serving(engine) as server:
        whole = (await server.post(PATH, messages=HELLO, tools=[WEATHER])).json()["choices"][0]
        _, *chunks, _ = await server.events(PATH, messages=HELLO, tools=[WEATHER], stream=True)
    (call,) = whole["message"]["tool_calls"]
    streamed = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert {key: call[key] for key in F_CITY} == F_CITY
    assert "".join(call["function"]["arguments"] for call in streamed) == F_CITY["function"]["arguments"]
    assert len(streamed) > 2
    assert whole["message"]["content"] == (None if calls == "pythonic" else "I look.")
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("unknown", "knob", "lines"), [(True, "auto", 1), (True, "off", 0), (False, "auto", 0)])
async def test_an_unknown_format_of_calls_is_logged(
    unknown: bool, knob: Any, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(saying("a", form=AnswerFormat(unknown_calls=unknown)), tool_format=knob) as server:
        await server.post(PATH, messages=HELLO)
    assert capsys.readouterr().err.count("tool_format") == lines


async def test_a_template_without_a_place_for_tools_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(saying("a", form=AnswerFormat(sees_tools=False))) as server:
        await server.post(PATH, messages=HELLO)
    assert capsys.readouterr().err.count("requests with tools are refused") == 1


async def test_continuous_usage_grows_with_the_tokens_that_were_read() -> None:
    engine = saying(*ALL)
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serving(engine) as server:
        events = await server.events(PATH, messages=HELLO, tools=TOOLS, stream=True, stream_options=options)
    *chunks, last, done = events
    assert done == "[DONE]"
    reported = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert reported == sorted(reported)
    assert reported[0] == 0
    assert reported[-1] == last["usage"]["completion_tokens"] == len(ALL)
    assert len(set(reported)) > 5
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "I call."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(deltas[:-1])  # no event for a token without text


async def test_a_thought_that_the_prompt_opens() -> None:
    words = ["I ", "call.\n", "</think>", "\n\n", *CALL]
    expected = {"role": "assistant", "content": None, **thought("I call."), "tool_calls": [F_CALL]}
    assert await message(saying(*words, opens_thought=True)) == (expected, "tool_calls")


async def test_an_empty_thought_is_left_out() -> None:
    assert await message(saying("<think>", "\n\n</think>\n\n", "Yes.")) == (
        {"role": "assistant", "content": "Yes."},
        "stop",
    )


async def test_without_tools_calls_are_text() -> None:
    text = {"role": "assistant", "content": "".join(CALL)}
    for fields in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        engine = saying(*CALL)
        assert await message(engine, **fields) == (text, "stop")
        assert engine.chats[0].tools is None
    assert await message(saying(*CALL, form=AnswerFormat())) == (text, "stop")


async def test_only_offered_tools_are_called() -> None:
    other = [{"type": "function", "function": {"name": "other"}}]
    assert (await message(saying(*CALL), tools=other))[0]["content"] == "".join(CALL)


async def test_one_call_without_parallel_tool_calls() -> None:
    said, reason = await message(saying(*ALL), parallel_tool_calls=False)
    assert said["tool_calls"] == [F_CALL]
    assert reason == "tool_calls"


async def test_the_format_is_a_knob() -> None:
    async with serving(saying(*ALL), tool_format="off", reasoning="off") as server:
        off = (await server.post(PATH, messages=HELLO, tools=TOOLS)).json()["choices"][0]
    async with serving(saying(*ALL, form=AnswerFormat()), tool_format="hermes", reasoning="think") as server:
        on = (await server.post(PATH, messages=HELLO, tools=TOOLS)).json()["choices"][0]
    assert off["message"] == {"role": "assistant", "content": "".join(ALL)}
    assert on["message"]["reasoning_content"] == "I call."
    assert len(on["message"]["tool_calls"]) == 2


async def test_markers_that_are_special_tokens_are_asked_for() -> None:
    markers = {"<think>": 7, "<tool_call>": 8, "</tool_call>": 9, "</think>": 10}
    form = AnswerFormat(
        calls="hermes", thoughts=True, markers=markers, special_markers=frozenset(markers) - {"</think>"}
    )
    engine = saying(*ALL, form=form)
    async with serving(engine) as server:
        await server.post(PATH, messages=HELLO, tools=TOOLS)
        await server.post(PATH, messages=HELLO, shown_special_ids=[3])
        await server.post("/v1/completions", prompt="a")
    assert [request.params.shown_special_ids for request in engine.submitted] == [(7, 8, 9), (3, 7), ()]


async def test_streamed_deltas() -> None:
    async with serving(saying(*ALL)) as server:
        role, *chunks, done = await server.events(PATH, messages=HELLO, tools=TOOLS, stream=True)
    assert done == "[DONE]"
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": None}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    ids = [call.pop("id") for delta in deltas for call in delta.get("tool_calls", ()) if "id" in call]
    assert len(set(ids)) == 2

    def begun(index: int) -> dict[str, Any]:
        call = {"index": index, "type": "function", "function": {"name": "f", "arguments": ""}}
        return {"tool_calls": [call]}

    def piece(index: int, text: str) -> dict[str, Any]:
        return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    assert deltas == [
        thought("I call."),
        {"content": "I"},
        {"content": " look."},
        begun(0),
        piece(0, "{"),
        piece(0, '"a": 1}'),
        begun(1),
        piece(1, "{"),
        piece(1, '"a": 1}'),
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 9 + ["tool_calls"]


async def test_choices_are_read_apart() -> None:
    async with serving(saying(*ALL)) as server:
        events = await server.events(PATH, messages=HELLO, tools=TOOLS, stream=True, n=2)
        whole = (await server.post(PATH, messages=HELLO, tools=TOOLS, n=2)).json()["choices"]
    for index in (0, 1):
        deltas = [e["choices"][0]["delta"] for e in events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
        assert sum("id" in call for delta in deltas for call in delta.get("tool_calls", ())) == 2
    ids = {call["id"] for choice in whole for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


async def test_every_token_keeps_its_logprob() -> None:
    async with serving(saying(*ALL)) as server:
        *events, _ = await server.events(PATH, messages=HELLO, tools=TOOLS, stream=True, logprobs=True)
        whole = (await server.post(PATH, messages=HELLO, tools=TOOLS, logprobs=True)).json()["choices"][0]
    reported = [
        token["token"] for event in events for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert reported == [token["token"] for token in whole["logprobs"]["content"]] == ALL


async def test_after_the_thought_events_are_as_cheap_as_ever() -> None:
    async with serving(saying("<think>", "a</think>", "b", "c", "d")) as server:
        *events, _ = await server.events(PATH, messages=HELLO, stream=True)
    assert [event["choices"][0]["delta"] for event in events[1:]] == [
        thought("a"),
        {"content": "b"},
        {"content": "c"},
        {"content": "d"},
    ]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"

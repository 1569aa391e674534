"""Tools on `/v1/chat/completions`: the grammar of the answer, and answers of a given form."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from aengine.config import ServerConfig
from aengine.http.openai.bodies import ChatRequest
from aengine.http.openai.chat import tool_use
from aengine.requests.sampling_params import SamplingParams
from aengine.requests.structured import Structured
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.parser import AnswerFormat
from aengine.text.reading import AnswerReading
from aengine.types import Fragment
from tests.http.openai.tools import CALL, HELLO, QWEN, TOOLS, named, reader
from tests.text.cutting import read_fragments

pytestmark = pytest.mark.anyio


STRICT = [named("f"), named("g", strict=True)]


@pytest.mark.parametrize(
    ("form", "knobs", "may_think", "opens_thought", "thought"),
    [
        (QWEN, {}, True, False, "possible"),
        (QWEN, {}, False, False, "never"),
        (QWEN, {}, True, True, "open"),
        (QWEN, {}, False, True, "open"),
        (QWEN, {"reasoning": "off"}, True, False, "never"),
        (QWEN, {"reasoning": "off"}, True, True, "never"),
        (AnswerFormat(), {}, True, False, "never"),
        (AnswerFormat(), {"reasoning": "think"}, True, False, "possible"),
    ],
)
def test_a_thought_may_come_before_an_answer_of_a_given_form(
    form: AnswerFormat, knobs: dict[str, Any], may_think: bool, opens_thought: bool, thought: str
) -> None:
    body = msgspec.convert({"messages": HELLO}, ChatRequest)
    formed = Structured(regex="a+")
    reading = AnswerReading(ServerConfig(**knobs), form, tool_use(body).rules, may_think=may_think, structured=formed)
    params = reading.engine_params(SamplingParams(structured=formed), opens_thought)
    assert params.structured == Structured(regex="a+", thought=thought)  # type: ignore[arg-type]
    assert reader(reading, opens_thought).plain == (thought == "never")


FORM = Structured(json_object=True)


def test_an_answer_of_a_given_form_may_be_a_call_instead() -> None:
    body = msgspec.convert({"messages": HELLO, "tools": STRICT, "parallel_tool_calls": False}, ChatRequest)
    reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules, structured=FORM)
    calls = reading.engine_params(SamplingParams(structured=FORM), opens_thought=False).structured.calls  # type: ignore[union-attr]
    assert (calls or "").startswith("calls: call\n")
    assert isinstance(reader(reading).feed(Fragment("".join(CALL)))[0], CallDelta)
    body.tool_choice = "none"
    reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules, structured=FORM)
    structured = reading.engine_params(SamplingParams(structured=FORM), opens_thought=False).structured
    assert structured == Structured(json_object=True, thought="possible")
    body.tool_choice = "required"
    reading = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules, structured=FORM)
    structured = reading.engine_params(SamplingParams(structured=FORM), opens_thought=False).structured
    assert structured is not None
    assert structured.origin == "tools"


@pytest.mark.parametrize(
    ("calls", "form"),
    [
        ("llama3", FORM),
        ("hermes", Structured(regex="(.|\n)+")),
        ("hermes", Structured(choice=("a",))),
        ("hermes", Structured()),
    ],
)
def test_structured_output_is_not_read_as_a_call(calls: Any, form: Structured) -> None:
    body = msgspec.convert({"messages": HELLO, "tools": STRICT}, ChatRequest)
    reading = AnswerReading(ServerConfig(), AnswerFormat(calls=calls), tool_use(body).rules, structured=form)
    structured = reading.engine_params(SamplingParams(structured=form), opens_thought=False).structured
    assert structured == form
    assert reader(reading).plain


def test_all_markers_are_shown_if_a_grammar_applies() -> None:
    """A hidden marker would join the texts around it to another marker or to the beginning of a call."""
    markers = {"<think>": 7, "</think>": 8, "<tool_call>": 9, "</tool_call>": 10, "<|python_tag|>": 11}
    form = AnswerFormat(calls="hermes", markers=markers, special_markers=frozenset(markers))
    for fields, shown in (({}, (9, 10)), ({"tools": STRICT}, (7, 8, 9, 10, 11))):
        body = msgspec.convert({"messages": HELLO, "tools": TOOLS, **fields}, ChatRequest)
        params = AnswerReading(ServerConfig(reasoning="off"), form, tool_use(body).rules).engine_params(
            SamplingParams(), False
        )
        assert tuple(sorted(params.shown_special_ids)) == shown


@pytest.mark.parametrize("cut", [1, 3, 1000])
@pytest.mark.parametrize("start", ["a ", "{", "<tool", " \n<", "<think>no</think>\n\na"])
def test_an_answer_of_a_given_form_may_quote_a_call(start: str, cut: int) -> None:
    body = msgspec.convert({"messages": HELLO, "tools": TOOLS}, ChatRequest)
    found = reader(AnswerReading(ServerConfig(), QWEN, tool_use(body).rules, structured=FORM))
    text = start + "".join(CALL) + " "
    answer = read_fragments(found, *(text[at : at + cut] for at in range(0, len(text), cut)))
    assert (answer.content, answer.calls) == (text.removeprefix("<think>no</think>\n\n"), ())


@pytest.mark.parametrize(
    ("fields", "may_think", "opens_thought", "beginning"),
    [
        ({"tool_choice": "required"}, True, False, "start: thought? calls\ncalls: call ("),
        ({"tool_choice": "required"}, False, False, "start: calls\ncalls: call ("),
        ({"tool_choice": "required"}, False, True, "start: thought calls\ncalls: call ("),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            True,
            False,
            "start: thought? calls\n",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, False, False, "start: calls\ncalls: call\n"),
        ({"tool_choice": "auto"}, True, False, None),
        (
            {"tool_choice": "auto", "tools": STRICT},
            True,
            False,
            "start: thought answer | unthinking\n",
        ),
        ({"tools": STRICT, "parallel_tool_calls": False}, False, False, "start: thought answer | unthinking\n"),
        ({"tool_choice": "none", "tools": STRICT}, True, False, None),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f")]}}},
            True,
            False,
            "start: thought answer | unthinking\n",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("g")]}}},
            False,
            False,
            "start: calls\ncalls: call (",
        ),
        ({"tool_choice": "none"}, True, False, None),
    ],
)
def test_the_grammar_of_forced_calls(
    fields: dict[str, Any], may_think: bool, opens_thought: bool, beginning: str | None
) -> None:
    body = msgspec.convert({"messages": HELLO, "tools": TOOLS, **fields}, ChatRequest)
    grammar = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules, may_think=may_think).calls_grammar(
        opens_thought
    )
    assert (grammar is None) == (beginning is None)
    assert grammar is None or grammar.startswith(beginning or "")


def test_unforced_calls_follow_schemas_only_if_strict() -> None:
    loose = {"type": "object", "properties": {"loose": {"type": "string"}}}
    tight = {"type": "object", "properties": {"tight": {"type": "string"}}}
    tools = [named("f", parameters=loose), named("g", parameters=tight, strict=True)]
    body = msgspec.convert({"messages": HELLO, "tools": tools}, ChatRequest)
    grammar = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules).calls_grammar(opens_thought=False) or ""
    assert "loose" not in grammar
    assert "tight" in grammar
    body.tool_choice = "required"
    grammar = AnswerReading(ServerConfig(), QWEN, tool_use(body).rules).calls_grammar(opens_thought=False) or ""
    assert "loose" in grammar


@pytest.mark.parametrize("parallel", [None, True, False])
def test_allowed_tools_are_called_in_parallel_or_not(parallel: bool | None) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f")]}}
    fields = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    use = tool_use(msgspec.convert(fields, ChatRequest))
    assert (use.names, use.forced, use.parallel) == ({"f"}, False, parallel is not False)

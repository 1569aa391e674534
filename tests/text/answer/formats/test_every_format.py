"""Properties of every format: calls come back as written, however the text is cut, and grammars accept them."""

from __future__ import annotations

import json
import re
import time
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aengine.config import CallFormatName, ServerConfig
from aengine.config.configure import configure
from aengine.text.answer.deltas import CallDelta, ContentDelta
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser
from aengine.text.grammar.calls import CallGrammar
from tests.text.answer.formats.calls import SCHEMA, UNCLOSED_STRINGS, parser
from tests.text.byte_grammars import MARKERS, accepts, call, calls
from tests.text.cutting import answer, cuts, read, shape

TOOL = CallableTool("f", SCHEMA, strict=True, where="tools[0].function.parameters")
LONGEST = 10**17  # the largest number that grammars allow

# Left out: texts that contain a format's own end, and characters that llguidance only accepts as escapes.
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n"), max_size=12).filter(
    lambda text: "</parameter>" not in text and "</arg_value>" not in text
)
odd_texts = st.sampled_from(
    ["", "\n", "\n\n a\n", "<", "</", "</para", "<tool_call>", "[", "')", '"', "\\n", "a, b=1)]", "5"]
)
numbers = st.integers(-LONGEST, LONGEST)
arguments = st.fixed_dictionaries(
    {"text": texts | odd_texts},
    optional={
        "count": numbers,
        "size": numbers | st.sampled_from([0.5, -2.25, 1000.125]),
        "sure": st.booleans(),
        "list": st.lists(texts | odd_texts | st.booleans(), max_size=3),
        "object": st.dictionaries(st.sampled_from("abc"), numbers, max_size=2),
        "maybe": st.none() | st.sampled_from(["", "no", "Nul", "\n"]),
        "unit": st.sampled_from(["c", "f", None]),
        "reference": st.just({}) | st.just({"x": 1}),
    },
)
forms = pytest.mark.parametrize("form", list(FORMATS))


def in_order(given: dict[str, Any]) -> dict[str, Any]:
    return {key: given[key] for key in SCHEMA["properties"] if key in given}


@forms
@given(data=st.data(), each=st.lists(arguments, min_size=1, max_size=3))
def test_calls_come_back_however_they_are_cut(
    form: CallFormatName, data: st.DataObject, each: list[dict[str, Any]]
) -> None:
    text = calls([("f", json.dumps(given)) for given in each], form)
    whole = answer(parser(form), text)
    assert [(found.name, json.loads(found.arguments)) for found in whole.calls] == [("f", given) for given in each]
    assert whole.content == ""
    assert shape(answer(parser(form), *data.draw(cuts(text)))) == shape(whole)
    assert shape(answer(parser(form), *text)) == shape(whole)


@forms
@given(each=arguments, special=st.booleans())
def test_a_grammar_accepts_what_the_format_writes(form: CallFormatName, each: dict[str, Any], special: bool) -> None:
    grammar = CallGrammar([TOOL], FORMATS[form], tokens=MARKERS if special else {})
    text = call("f", json.dumps(in_order(each), ensure_ascii=False), form)
    assume(not special or "<tool_call>" not in json.dumps(each))  # a single token is not text
    assert accepts(grammar.forced(), text, special), text


@forms
def test_one_call_where_no_more_may_be(form: CallFormatName) -> None:
    two = calls([("f", '{"text": "a"}'), ("g-2", "{}")], form)
    assert [found.name for found in answer(parser(form), two).calls] == ["f", "g-2"]
    assert [found.name for found in answer(parser(form, parallel=False), two).calls] == ["f"]


PIECES = [
    *(call("f", '{"text": "a"}', form) for form in FORMATS),
    *MARKERS,
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<arg_key>text</arg_key>",
    "<function=f>",
    "<function=",
    "<parameter=text>",
    "</parameter>",
    "</function>",
    "f(",
    "f(text=",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "\\",
    "=",
    ",",
    "f",
    "\n",
    " ",
    "1",
]


@forms
@given(data=st.data(), text=st.lists(st.sampled_from(PIECES), max_size=10).map("".join))
def test_the_cut_makes_no_difference_to_what_is_broken(form: CallFormatName, data: st.DataObject, text: str) -> None:
    whole = shape(answer(parser(form), text))
    assert shape(answer(parser(form), *data.draw(cuts(text)))) == whole
    assert shape(answer(parser(form), *text)) == whole
    if not whole[2]:
        assert whole[1] == text
    for _, written in whole[2]:
        assert isinstance(json.loads(written), dict)


@forms
@given(data=st.data(), each=st.lists(arguments, min_size=1, max_size=3))
def test_arguments_are_json_whatever_is_left_out(
    form: CallFormatName, data: st.DataObject, each: list[dict[str, Any]]
) -> None:
    text = calls([("f", json.dumps(given)) for given in each], form)
    at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 12))
    text = text[:at] + data.draw(st.sampled_from(["", *PIECES])) + text[at + length :]
    whole = shape(answer(parser(form), text))
    assert shape(answer(parser(form), *text)) == whole
    for _, written in whole[2]:
        assert isinstance(json.loads(written), dict)


@forms
@given(data=st.data(), given=arguments)
def test_an_answer_that_is_cut_short_has_no_half_call_as_text(
    form: CallFormatName, data: st.DataObject, given: dict[str, Any]
) -> None:
    text = call("f", json.dumps(given), form)
    reading = parser(form, forced=True)
    deltas = reading.feed(text[: data.draw(st.integers(0, len(text) - 1))]) + reading.finish(cut=True)
    assert all(isinstance(delta, CallDelta) for delta in deltas)


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.syntax.has_bare_calls])
def test_an_optional_call_without_a_marker_that_is_cut_is_no_text(form: CallFormatName) -> None:
    text = call("f", '{"text": "a"}', form)
    for end in range(1, len(text)):
        reading = parser(form)
        deltas = reading.feed(text[:end]) + reading.finish(cut=True)
        assert all(isinstance(delta, CallDelta) for delta in deltas)
    for other in (f"{text[: text.index('f') + 1]}g", '{"text": 1', "[1, 2"):
        reading = parser(form)
        deltas = reading.feed(other) + reading.finish(cut=True)
        assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == other


@forms
def test_an_optional_call_that_is_cut_within_its_marker_is_no_text(form: CallFormatName) -> None:
    marker = FORMATS[form].syntax.begin
    for end in range(3, len(marker)):
        reading = parser(form)
        deltas = reading.feed("Look:" + marker[:end]) + reading.finish(cut=True)
        assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == "Look:"


@forms
@pytest.mark.parametrize("name", ["h", "", "f.f"])
def test_a_call_of_a_tool_that_is_not_there_is_content(form: CallFormatName, name: str) -> None:
    text = call(name, '{"text": "a"}', form)
    assert shape(answer(parser(form), text)) == ("", text, [])


@forms
def test_ids_are_as_the_family_has_them(form: CallFormatName) -> None:
    (found,) = answer(parser(form), call("g-2", "{}", form)).calls
    expected = "[A-Za-z0-9]{9}" if form.startswith("mistral") else "call_[0-9a-f]{24}"
    assert re.fullmatch(r"functions\.g-2:0" if form == "kimi" else expected, found.id)


@forms
@pytest.mark.parametrize(
    "body",
    [
        "<" * 30_000,
        *(
            pytest.param(body, marks=pytest.mark.slow)
            for body in ("[" * 30_000, "x" * 30_000, '\\"' * 15_000, "\n" * 30_000)
        ),
    ],
)
def test_time_is_linear(form: CallFormatName, body: str) -> None:
    written = call("f", '{"text": "~"}', form).replace("~", body)
    begin = time.process_time()
    answer(parser(form), *(written[at : at + 2] for at in range(0, len(written), 2)))
    read(AnswerParser(None, parser(form)), written[:-30] * 3)
    assert time.process_time() - begin < 1.5  # 25 us per character; quadratic time would be tens of seconds


@pytest.mark.parametrize(("form", "text"), UNCLOSED_STRINGS)
def test_the_time_for_strings_that_are_not_closed_is_linear(form: CallFormatName, text: str) -> None:
    begin = time.process_time()
    for each in (
        text * (20_000 // len(text)),
        text[:-20] + "} " * 8_000,
        text[:-20] + FORMATS[form].syntax.end * 1_500,
    ):
        answer(parser(form), *each)
        read(AnswerParser(None, parser(form)), each)
    assert time.process_time() - begin < 2  # quadratic time would be tens of seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("pythonic", "[f("),
        ("pythonic", "[f(text="),
        ("gemma4", "<|tool_call>call:f{"),
        ("gemma4", "<|tool_call>call:f{text:"),
    ],
)
def test_the_time_for_a_word_is_linear(form: CallFormatName, begun: str) -> None:
    begin = time.process_time()
    reading = parser(form)
    for text in (begun, *(["x"] * 800_000)):
        reading.feed(text)
    reading.finish()
    assert time.process_time() - begin < 5  # quadratic time is 10 s


@forms
def test_schemas_of_grammars_bind_the_arguments(form: CallFormatName) -> None:
    grammar = CallGrammar([TOOL], FORMATS[form]).forced()
    for wrong in (
        {},
        {"text": "a", "count": "x"},
        {"text": "a", "unit": "k"},
        {"text": "a", "maybe": "long"},
        {"b": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)
        assert not accepts(grammar, call("f", json.dumps(wrong), form)), wrong


def test_the_knob_knows_every_format() -> None:
    assert set(get_args(CallFormatName)) == FORMATS.keys()
    for form in FORMATS:
        assert configure(ServerConfig, {}, tool_format=form).tool_format == form


@pytest.mark.parametrize("behind", ["", "\n", " It is.", "</tool_call>", "\n</tool_call>\n"])
def test_a_closing_tag_behind_a_list_of_granites_is_no_content(behind: str) -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"text": "a"}}]'
    for end in ("</tool_call>", "\n</tool_call>"):
        found = shape(answer(parser("granite"), text + end + behind))
        assert found == shape(answer(parser("granite"), *text, *end, *behind))
        assert found == ("", behind.lstrip(), [("f", '{"text": "a"}')])


def test_a_closing_tag_that_granite_did_not_open_is_content() -> None:
    text = '<|tool_call|>[{"name": "f", "arguments": {"text": "a"}}]'
    assert shape(answer(parser("granite"), *text, *"</tool_call>"))[1] == "</tool_call>"
    text = '<tool_call>[{"name": "f", "arguments": {"text": "a"}}]'
    assert shape(answer(parser("granite"), *text, *"</tool_calls>"))[1] == "</tool_calls>"
    assert shape(answer(parser("granite"), *text, *"I see </tool_call>"))[1] == "I see </tool_call>"

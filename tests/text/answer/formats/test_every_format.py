"""What holds for every format: calls come back as written, however the text is cut, and grammars accept them."""

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
from aengine.configure import configure
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import MARKERS, accepts, call, calls
from tests.text.cutting import answer, cuts, shape

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "size": {"type": "number"},
        "sure": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": ["string", "boolean"]}},
        "object": {"type": "object", "additionalProperties": {"type": "integer"}},
        "maybe": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
        "unit": {"enum": ["c", "f", None]},
        "reference": {"$ref": "#/$defs/point"},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}},
}
TOOLS = {"f": SCHEMA, "g-2": None}
TOOL = CallableTool("f", SCHEMA, strict=True, where="tools[0].function.parameters")
LONGEST = 10**17  # of what grammars let a number be

# What no format can tell from its own end is left out, and so is what llguidance knows as escapes alone.
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


def parser(form: CallFormatName, **options: bool) -> ToolCallParser:
    return ToolCallParser(FORMATS[form], TOOLS, **options)


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
    assume(not special or "<tool_call>" not in json.dumps(each))  # as a token it is no text
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


@forms
@pytest.mark.parametrize("name", ["h", "", "f f"])
def test_a_call_of_a_tool_that_is_not_there_is_content(form: CallFormatName, name: str) -> None:
    text = call(name, '{"text": "a"}', form)
    assert shape(answer(parser(form), text)) == ("", text, [])


@forms
def test_ids_are_as_the_family_has_them(form: CallFormatName) -> None:
    (found,) = answer(parser(form), call("g-2", "{}", form)).calls
    assert re.fullmatch("[A-Za-z0-9]{9}" if form.startswith("mistral") else "call_[0-9a-f]{24}", found.id)


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
    AnswerParser(None, parser(form)).read(written[:-30] * 3)
    assert time.process_time() - begin < 1.5  # 25 us per character; quadratic time would be tens of seconds


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

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
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.parser import AnswerParser
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import MARKERS, accepts, call, calls
from tests.text.cutting import answer, cuts, read, shape

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


UNMARKED: list[tuple[CallFormatName, str]] = [
    ("qwen3_coder", "<function=f>\n<parameter=text>\nOslo\n</parameter>\n</function>\n</tool_call>"),
    ("seed", "<function=f><parameter=text>Oslo</parameter></function></seed:tool_call>"),
    (
        "deepseek",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"text": "Oslo"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "Oslo"}<｜tool▁call▁end｜>'),
    ("glm", "f\n<arg_key>text</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"),
    ("glm", "f<arg_key>text</arg_key><arg_value>Oslo</arg_value></tool_call>"),
    ("mistral", 'f[ARGS]{"text": "Oslo"}'),
]


@pytest.mark.parametrize("form", ["qwen3_coder", "seed"])
def test_a_marker_that_is_quoted_begins_no_call(form: CallFormatName) -> None:
    text = "Write `<function=f>` to call it, or `f<arg_key>`."
    assert shape(answer(parser(form), text)) == ("", text, [])
    assert shape(answer(parser(form), *text)) == ("", text, [])


@pytest.mark.parametrize(("form", "written"), UNMARKED)
def test_a_call_is_read_without_the_marker_before_it(form: CallFormatName, written: str) -> None:
    call = ("f", '{"text": "Oslo"}')
    text = f"I'll look.\n\n{written}"
    assert shape(answer(parser(form), text)) == ("", "I'll look.", [call])
    assert shape(answer(parser(form), *text)) == ("", "I'll look.", [call])
    assert shape(answer(parser(form), f"{text}\n{written}")) == ("", "I'll look.", [call] * 2)
    for other in ("h", "ff", "f-f"):  # there is no tool of that name
        text = written.replace(">f", f">{other}").replace("=f", f"={other}")
        text = other + text[1:] if text[0] == "f" else text
        assert shape(answer(parser(form), *f"I see {text}")) == ("", f"I see {text}", [])
    assert shape(answer(parser(form, lenient=False), written))[2] == []


UNCLOSED: list[tuple[CallFormatName, str]] = [
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\nOslo\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\nOslo\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>Oslo</function></tool_call>"),
    ("seed", "<seed:tool_call><function=f><parameter=text>Oslo</function></seed:tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>Oslo</tool_call>"),
    ("glm", "<tool_call>f\n<arg_key>text<arg_value>Oslo</tool_call>"),
    ("gemma4", '<|tool_call>call:f{text:<|"|>Oslo<tool_call|>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "Oslo"'),
    ("llama3", '{"name": "f", "parameters": {"text": "Oslo"'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "Oslo'),
    ("pythonic", '[f(text="Oslo"'),
    ("olmo", '<function_calls>f(text="Oslo"</function_calls>'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "Oslo"<｜tool▁call▁end｜>'),
]

_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
UNCLOSED_STRINGS: list[tuple[CallFormatName, str]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"text": "Oslo}}\n</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "Oslo</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"text\\": \\"Oslo\\"}}</tool_call>'),
    ("phi4", '<|tool_call|>[{"name": "f", "arguments": {"text": "Oslo}}]<|/tool_call|>'),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"text": "Oslo}}]'),
    ("llama3", '{"name": "f", "parameters": {"text": "Oslo}}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"text": "Oslo}'),
    ("mistral_list", '[TOOL_CALLS][{"name": "f", "arguments": {"text": "Oslo}}]'),
    (
        "deepseek",
        f'<｜tool▁calls▁begin｜>{_CALL}function<｜tool▁sep｜>f\n```json\n{{"text": "Oslo}}\n```{_CALL_END}'
        "<｜tool▁calls▁end｜>",
    ),
    ("deepseek_v31", f'<｜tool▁calls▁begin｜>{_CALL}f<｜tool▁sep｜>{{"text": "Oslo}}{_CALL_END}<｜tool▁calls▁end｜>'),
    ("pythonic", '[f(text="Oslo)]'),
    ("olmo", '<function_calls>f(text="Oslo)</function_calls>'),
]
UNCLOSED_STRINGS_ENDED_BY_A_TOKEN: list[tuple[CallFormatName, str]] = [
    ("gemma4", '<|tool_call>call:f{text:<|"|>Oslo}<tool_call|>'),
    ("gemma4", '<|tool_call>call:f{text:<|"|>Oslo}\n<tool_call|>'),
]
UNCLOSED += UNCLOSED_STRINGS + UNCLOSED_STRINGS_ENDED_BY_A_TOKEN
UNCLOSED += [
    ("olmo", "<function_calls>f(text='Oslo)\n</function_calls>"),
    ("granite", '<tool_call>[{"name": "f", "arguments": {"text": "Oslo}}]</tool_call>'),
]


@pytest.mark.parametrize(
    ("form", "text"),
    [each for each in UNCLOSED_STRINGS + UNCLOSED_STRINGS_ENDED_BY_A_TOKEN if each[0] != "llama3"],
)
def test_a_string_that_is_not_closed_swallows_nothing_behind_its_call(form: CallFormatName, text: str) -> None:
    further = call("f", '{"text": "a"}', form)
    first, second = ("f", '{"text": "Oslo"}'), ("f", '{"text": "a"}')
    for behind, found in (
        (f"\n{further}", ("", "", [first, second])),
        (f"\n{text}\n{further}\n", ("", "", [first, first, second])),
    ):
        assert shape(answer(parser(form), text + behind)) == found
        assert shape(answer(parser(form), *text, *behind)) == found


def test_text_behind_a_string_that_is_not_closed_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"text": "a[0] is it}}\n</tool_call>\nI\'ll "look", wait.'
    found = ("", 'I\'ll "look", wait.', [("f", '{"text": "a[0] is it"}')])
    assert shape(answer(parser("hermes"), text)) == found
    assert shape(answer(parser("hermes"), *text)) == found


@pytest.mark.parametrize("form", sorted({form for form, _ in UNCLOSED_STRINGS}))
@given(
    data=st.data(),
    value=st.lists(st.sampled_from([*MARKERS, "```", "}", "]", ")", "}}\n", " ", "a", "\\"])).map("".join),
)
def test_a_closed_string_may_hold_any_tag(form: CallFormatName, data: st.DataObject, value: str) -> None:
    arguments: dict[str, Any] = {"text": value, "maybe": {value: [value, 1]}}
    if form not in ("olmo", "pythonic"):  # a keyword cannot be any text
        arguments[value] = value
    text = calls([("f", json.dumps(arguments)), ("f", '{"text": "a"}')], form)
    found = [json.loads(written) for _, written in shape(answer(parser(form), *data.draw(cuts(text))))[2]]
    assert found == [arguments, {"text": "a"}]


@pytest.mark.parametrize(("form", "text"), UNCLOSED)
def test_what_is_not_closed_ends_with_what_is_around_it(form: CallFormatName, text: str) -> None:
    found = ("", "", [("f", '{"text": "Oslo"}')])
    assert shape(answer(parser(form), text)) == found
    assert shape(answer(parser(form), *text)) == found


@pytest.mark.parametrize(
    ("form", "text", "found"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<function=g-2>\n</function>\n</tool_call>",
            [("f", '{"text": "a"}'), ("g-2", "{}")],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=text>\na\n<parameter=count>\n1\n</parameter>\n</function>\n"
            "<function=f>\n<parameter=text>\nb\n</parameter>\n</function>\n</tool_call>",
            [("f", '{"text": "a", "count": 1}'), ("f", '{"text": "b"}')],
        ),
        (
            "glm",
            "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\n<arg_key>count</arg_key><arg_value>1</tool_call>\n"
            "<tool_call>g-2</tool_call>",
            [("f", '{"text": "a", "count": 1}'), ("g-2", "{}")],
        ),
        (
            "phi4",
            'functools[{"name": "f", "arguments": {"text": "a"}}, {"name": "g-2"}]',
            [("f", '{"text": "a"}'), ("g-2", "{}")],
        ),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"text": "a"}}]', [("f", '{"text": "a"}')]),
        ("pythonic", '[f(text=["a)]', [("f", '{"text": ["a"]}')]),
        ("mistral", "[TOOL_CALLS]g-2[ARGS]null", [("g-2", "{}")]),
        ("mistral", "[TOOL_CALLS]g-2[ARGS]null[TOOL_CALLS]g-2[ARGS][]", [("g-2", "{}")] * 2),
        ("mistral", '[TOOL_CALLS]f[ARGS]"{\\"text\\": \\"a\\"}"', [("f", '{"text": "a"}')]),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g-2<｜tool▁sep｜>null<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("g-2", "{}")],
        ),
        (
            "deepseek",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g-2<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [("g-2", "{}")],
        ),
        ("phi4", '<|tool_call|>[{"name": "g-2", "arguments": []}]<|/tool_call|>', [("g-2", "{}")]),
    ],
)
def test_what_models_write_beside_their_format(form: CallFormatName, text: str, found: list[tuple[str, str]]) -> None:
    assert shape(answer(parser(form), text))[2] == found
    assert shape(answer(parser(form), *text)) == shape(answer(parser(form), text))


@pytest.mark.parametrize(
    "value", ["a </function> b", "</tool_call>", "<parameter=x>\n1\n</parameter>", "<tool_call>\n<function=f>\n"]
)
def test_a_closed_value_may_hold_any_other_tag(value: str) -> None:
    text = calls([("f", json.dumps({"text": value})), ("f", '{"text": "a"}')], "qwen3_coder")
    found = [json.loads(written) for _, written in shape(answer(parser("qwen3_coder"), *text))[2]]
    assert found == [{"text": value}, {"text": "a"}]


@forms
@pytest.mark.parametrize("name", ["h", "", "f.f"])
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

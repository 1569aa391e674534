"""Calls that models write differently from their format."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import CallFormatName
from tests.text.answer.formats.calls import UNCLOSED_STRINGS, parser
from tests.text.byte_grammars import MARKERS, call, calls
from tests.text.cutting import answer, cuts, read, shape

HY3: list[tuple[CallFormatName, str]] = [("hy3", ":opensource>"), ("hy3_preview", ">")]
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
    ("internlm", '<|plugin|>\n{"name": "f", "parameters": {"text": "Oslo"}}<|action_end|>'),
    *(
        (
            form,
            f"<tool_call{end}f<tool_sep{end}<arg_key{end}text</arg_key{end}<arg_value{end}Oslo</arg_value{end}"
            f"</tool_call{end}</tool_calls{end}",
        )
        for form, end in HY3
    ),
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
        text = written.replace(">f", f">{other}").replace("=f", f"={other}").replace('"f"', f'"{other}"')
        text = other + text[1:] if text[0] == "f" else text
        assert shape(answer(parser(form), *f"I see {text}")) == ("", f"I see {text}", [])
    assert shape(answer(parser(form, lenient=False), written))[2] == []


@pytest.mark.parametrize(
    ("form", "name", "begun"), [("glm", "f\n", "<arg_k"), ("glm", "f", "<ar"), ("mistral", "f", "[ARGS")]
)
def test_the_beginning_of_a_call_without_the_marker_before_it_is_no_content(
    form: CallFormatName, name: str, begun: str
) -> None:
    text = "I'll look.\n\n"
    assert shape(read(parser(form), text + name + begun, cut=True)) == ("", text, [])
    assert shape(read(parser(form), text + name + begun)) == ("", text + name + begun, [])
    other = text + name.replace("f", "h")  # there is no tool of that name
    assert shape(read(parser(form), other + begun, cut=True)) == ("", other, [])


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
    ("lfm2", '<|tool_call_start|>[f(text="Oslo"]<|tool_call_end|>'),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "Oslo"<｜tool▁call▁end｜>'),
]
for hy3, end in HY3:
    UNCLOSED += [
        (hy3, f"<tool_calls{end}\n<tool_call{end}f<tool_sep{end}\n<arg_key{end}text</arg_key{end}<arg_value{end}{text}")
        for text in ("Oslo", f"Oslo</tool_call{end}\n</tool_calls{end}", f"Oslo</tool_calls{end}")
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
    [each for each in UNCLOSED_STRINGS + UNCLOSED_STRINGS_ENDED_BY_A_TOKEN if each[0] not in ("llama3", "glm4")],
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
    if form not in ("olmo", "pythonic", "lfm2"):  # a keyword cannot be any text
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
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=text\na\n</parameter>\n<parameter=count\n1\n</function>\n</tool_call>",
            [("f", '{"text": "a", "count": 1}')],
        ),
        (
            "qwen3_coder",
            '<tool_call>\n<function="f">\n<parameter="count">\n1\n</parameter>\n</function>\n</tool_call>',
            [("f", '{"count": 1}')],
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
        *(
            (
                "command_r",
                f'Action:{blank}```json\n[\n    {{"tool_name": "g-2", "parameters": {{}}}}\n]```',
                [("g-2", "{}")],
            )
            for blank in ("", " ", "\n")
        ),
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

"""Calls are separated from content in both formats, wherever the text is cut. Other text stays content."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta, ContentDelta
from aengine.text.answer.formats.table import FORMATS, call_format_of
from aengine.text.answer.parser import AnswerParser
from aengine.text.answer.thought import ThoughtParser
from tests.text.cutting import answer, cuts, read, shape

TOOLS = {"f": None, "get_weather": None}
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
CALL = f"<tool_call>\n{PARIS}\n</tool_call>"


def hermes(**options: bool) -> ToolCallParser:
    return ToolCallParser(FORMATS["hermes"], TOOLS, **options)


def llama(**options: bool) -> ToolCallParser:
    return ToolCallParser(FORMATS["llama3"], TOOLS, **options)


GOOD = [
    ("no call\n", "no call\n", []),
    ("", "", []),
    (" \n", " \n", []),
    (CALL, "", [("get_weather", '{"city": "Paris"}')]),
    (f"\n\n{CALL}\n", "", [("get_weather", '{"city": "Paris"}')]),
    (f"I look.\n{CALL}", "I look.", [("get_weather", '{"city": "Paris"}')]),
    (f"{CALL}\nDone.", "Done.", [("get_weather", '{"city": "Paris"}')]),
    (f"I look.\n{CALL}\nDone.\n", "I look.\nDone.\n", [("get_weather", '{"city": "Paris"}')]),
    (f"{CALL}\n{CALL}", "", [("get_weather", '{"city": "Paris"}')] * 2),
    (f"a {CALL} b {CALL} c", "a b c", [("get_weather", '{"city": "Paris"}')] * 2),
    ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1, {}]}')]),
    ('<tool_call>{"name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"id": 7, "x": [{"name": 1}], "n\\u0061me": "\\u0066", "y": null}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\"{"}}</tool_call>',
        "",
        [("f", '{"a": "}</tool_call>\\"{"}')],
    ),
    # Mistakes that still leave no doubt.
    ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}\n</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}}\n<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")] * 2),
    ('<tool_call>{"name": "f"}\n</tool_', "</tool_", [("f", "{}")]),
    # Mistakes after the call has begun.
    ('<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": "b\\', "", [("f", '{"a": "b"}')]),
    ('<tool_call>{"name": "f", "arguments": {oops}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {"a": 1 oops}}</tool_call>', "oops}}</tool_call>", [("f", '{"a": 1 }')]),
    # Arguments as text, or none.
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', "", [("f", '{"a": "b"}')]),
    ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"arguments": null, "name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": [ ]}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "f"}]</tool_call>', "", [("f", "{}")] * 2),
    ('<tool_call>{"name": "f", "arguments": {}, oops}</tool_call>', "oops}</tool_call>", [("f", "{}")]),
]
NOT_CALLS = [
    "<tool_call>",
    "<tool_call",
    "a <tool_call> b",
    "<tool_call>\noops\n</tool_call>",
    "<tool_call>[]</tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "go"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": 5}</tool_call>',
    '<tool_call>{"name" "f", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "arguments"',
    '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    '<tool_call>{"arguments": {"a": 1}',
    "<tool_call>{'name': 'f'}</tool_call>\n",
    f" x {PARIS}",
    PARIS,
]


@pytest.mark.parametrize(("text", "content", "calls"), GOOD)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(hermes(), text)) == ("", content, calls)


@pytest.mark.parametrize("text", NOT_CALLS)
def test_what_is_no_call_is_content(text: str) -> None:
    assert shape(answer(hermes(), text)) == ("", text, [])
    after = f"{text} then {CALL}"
    if not text.endswith(("<tool_call", '"arguments"', "}", "<tool_call>")):  # left open
        assert shape(answer(hermes(), after)) == ("", f"{text} then", [("get_weather", '{"city": "Paris"}')])


F = '{"name": "f", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F, "", [("f", '{"a": 1}')]),
        (f"\n\n{F}\n", "", [("f", '{"a": 1}')]),
        (f"<|python_tag|>{F}", "", [("f", '{"a": 1}')]),
        (f"I look. <|python_tag|>{F}", "I look.", [("f", '{"a": 1}')]),
        (f"{F}; {F};\n{F}", "", [("f", '{"a": 1}')] * 3),
        (f"{F}<|python_tag|>{F}", "", [("f", '{"a": 1}')] * 2),
        (f"{F} and so on", "and so on", [("f", '{"a": 1}')]),
        (f"{F}; then", "; then", [("f", '{"a": 1}')]),
        (f"{F}; {{}}", "; {}", [("f", '{"a": 1}')]),
        (f"See {F}", f"See {F}", []),
        ('{"city": "Paris"}', '{"city": "Paris"}', []),
        ("{}", "{}", []),
        (f"{{{F}", f"{{{F}", []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        (' {"name": "Alice"}', ' {"name": "Alice"}', []),
    ],
)
def test_llama3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(llama(), text)) == ("", content, calls)


def test_a_marker_that_may_begin_is_the_beginning() -> None:
    assert shape(answer(llama(), "<", F)) == ("", f"<{F}", [])


def test_without_parallel_calls_the_first_one_counts() -> None:
    assert shape(answer(hermes(parallel=False), f"a {CALL} {CALL} b")) == (
        "",
        "a b",
        [("get_weather", '{"city": "Paris"}')],
    )


def test_pieces_are_told_as_soon_as_they_are_sure() -> None:
    parser = hermes()
    assert parser.feed("I look. ") == [ContentDelta("I look.")]
    assert parser.feed("<tool") == []
    assert parser.feed('_call>\n{"name": "f"') == []
    first, second = parser.feed(', "arguments": {"a"')  # a key is written with its value
    assert isinstance(first, CallDelta)
    assert isinstance(second, CallDelta)
    assert (first.index, first.name, first.arguments) == (0, "f", "")
    assert first.id is not None
    assert first.id.startswith("call_")
    assert second == CallDelta(0, "{")
    assert parser.feed(": 1}") == [CallDelta(0, '"a": 1}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.calls == 1
    assert parser.finish() == []


def test_ids_are_random() -> None:
    ids = [call.id for _ in range(2) for call in answer(hermes(), CALL, CALL).calls]
    assert len(set(ids)) == 4


WORDS = [
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<tool",
    "_call>",
    "<",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    '"name"',
    '"arguments"',
    '"parameters"',
    '"f"',
    '{"name": "f", "arguments": {',
    '{"name": "f", "parameters": {}}',
    CALL,
    "\n",
    " ",
    ";",
    "1",
    "é",
]
texts = st.lists(st.sampled_from(WORDS), max_size=14).map("".join)


@pytest.mark.parametrize("make", [hermes, llama])
@given(data=st.data(), text=texts)
def test_the_cut_makes_no_difference(make: type[ToolCallParser], data: st.DataObject, text: str) -> None:
    fragments = data.draw(cuts(text))
    assert shape(answer(make(), *fragments)) == shape(answer(make(), text)), fragments
    assert shape(answer(make(), *text)) == shape(answer(make(), text))


@pytest.mark.parametrize("make", [hermes, llama])
@given(text=texts)
@example("a<tool_call>{")
def test_without_a_call_nothing_is_lost(make: type[ToolCallParser], text: str) -> None:
    _, content, calls = shape(answer(make(), text))
    if not calls:
        assert content == text
    else:
        remaining = iter(text)
        assert all(character in remaining for character in content)  # in order


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(arguments=st.dictionaries(st.text(), json_values), indent=st.sampled_from([None, 2]), data=st.data())
def test_all_arguments_pass_unchanged(arguments: dict[str, object], indent: int | None, data: st.DataObject) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=data.draw(st.booleans()))
    name_first = data.draw(st.booleans())
    members = ['"name": "f"', f'"arguments": {written}']
    text = f"<tool_call>{{{', '.join(members if name_first else members[::-1])}}}</tool_call>"
    assert shape(answer(hermes(), *data.draw(cuts(text)))) == ("", "", [("f", written)])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 40_000,
        '<tool_call>{"arguments": {"a": "' + "x" * 40_000,
        "<tool_call>" * 4_000,
        '<tool_call>{"' * 4_000,
        " " * 40_000,
        "<" * 40_000,
        "[" * 40_000,
    ],
    ids=["arguments", "arguments first", "markers", "keys", "blanks", "edges", "brackets"],
)
def test_time_is_linear(text: str) -> None:
    begin = time.process_time()
    answer(hermes(), *text)
    read(AnswerParser(ThoughtParser(), hermes()), text * 3)
    assert time.process_time() - begin < 2  # 25 us per character; quadratic time would be tens of seconds


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("<tool_call>\n<function=f>", None),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}", "mistral"),
        ("use [func_name1(params_name1=params_value1, ...), func_name2(params)]", "pythonic"),
        ("Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]", "pythonic"),
        ("<tool_call>f<arg_key>", None),
        ("{{ '<|tool_call>call:' + call.name + '<|\"|>' }}", "gemma4"),
        ("{{ '<｜tool▁calls▁begin｜>' + call.name + '\\n```json\\n' }}", "deepseek"),
        ("{{ '<｜tool▁calls▁begin｜>' + call.name + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("{{ '<|tool_calls_section_begin|>' + calls }}", "kimi"),
        ('<minimax:tool_call>{{ \'<invoke name="\' + f }}<parameter name="a">', "minimax"),
        ("{{ '<|tool_call|>' + calls + '<|/tool_call|>' }}", "phi4"),
        ("{{ '<|tool_call|>' + calls }}", "granite"),
        ("{{ '<function_calls>' + calls + '</function_calls>' }}", "olmo"),
        ("{{ '<|tool_list_start|>' + tools }}", "lfm2"),
        ("{{ '<|START_ACTION|>[' + calls }}", "cohere"),
        ('1. Action: write <|START_ACTION|>, then "tool_name" and "parameters".\n```json\n[', "cohere"),
        ("{%- set calls_token = '<|tools_prefix|>' -%}", "apertus"),
        ("{{ '<TOOLCALL>[' + calls + ']</TOOLCALL>' }}", "nemotron"),
        ("<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>", "glm"),
        ("{% set end = ':opensource>' %}{{ '<tool_call' + end + name + '<tool_sep' + end + '<arg_key' }}", "hy3"),
        ("<tool_calls>\n<tool_call>{name}<tool_sep>\n<arg_key>{key}</arg_key>\n<arg_value>", "hy3_preview"),
        ("# 可用工具\n\n## {{ tool.name }}\n在调用上述函数时，请使用 Json 格式表示调用的参数。", "glm4"),
        ("Write 'Action:' followed by a list:\n```json\n[\n    {\n        \"tool_name\": title", "command_r"),
        ("{{ '<|action_start|><|plugin|>\n' + calls }}", "internlm"),
        ("{{ '<seed:tool_call>' }}<function=f>\n<parameter=a>", "seed"),
        ('[TOOL_CALLS] {"name": "parameters": }', "mistral_list"),
        ("{{ '{\"name\": \"' + call.name + '\", ' + '\"parameters\": ' }}", "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_template(template: str, expected: str | None) -> None:
    assert call_format_of(["{{ messages }}", template]) == expected

"""XML calls: strings without quotes, all other values as JSON, piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.formats.table import FORMATS
from tests.text.cutting import answer, shape

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "f": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "n": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "m": {"type": ["string", "integer", "array"]},
        "r": {"$ref": "#/$defs/text"},
    },
    "$defs": {"text": {"allOf": [{"type": "string"}]}},
}


def parser() -> ToolCallParser:
    return ToolCallParser(FORMATS["qwen3_coder"], {"f": SCHEMA, "g": None})


def element(key: str, text: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>{text}</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "\nParis\n", "Paris"),
        ("s", "Paris", "Paris"),
        ("s", "\n\n  a\n\n", "\n  a\n"),
        ("s", "\n\n", ""),
        ("s", "\n", ""),
        ("s", "", ""),
        ("s", "\n5\n", "5"),
        ("s", "\nnull\n", "null"),
        ("s", '\n{"a": 1}\n', '{"a": 1}'),
        ("s", "\nif a < b </para:\n\t\"'\\\n", "if a < b </para:\n\t\"'\\"),
        ("r", "\n5\n", "5"),
        ("i", "\n 5 \n", 5),
        ("i", "\nfive\n", "five"),
        ("f", "\n-1e3\n", -1000.0),
        ("b", "\nTrue\n", True),
        ("b", "false", False),
        ("o", '\n{"a": [1, {}]}\n', {"a": [1, {}]}),
        ("o", "\n{'a': True, 'b': None}\n", {"a": True, "b": None}),
        ("o", "\n{oops}\n", "\n{oops}\n".strip()),
        ("n", "\nnull\n", None),
        ("n", "\nNone\n", None),
        ("n", "\nnullable\n", "nullable"),
        ("n", "\nN\n", "N"),
        ("n", "\n5\n", "5"),
        ("m", "\n5\n", 5),
        ("m", "\n5a\n", "5a"),
        ("m", "\n5.5\n", "5.5"),
        ("m", "\n[1]\n", [1]),
        ("m", "\n{}\n", "{}"),
        ("unknown", "\n[1, true]\n", [1, True]),
        ("unknown", "\ntext\n", "text"),
    ],
)
def test_a_value_is_of_the_kind_that_its_schema_says(key: str, text: str, value: object) -> None:
    for fragments in ([element(key, text)], list(element(key, text))):
        (call,) = answer(parser(), *fragments).calls
        assert json.loads(call.arguments) == {key: value}


def test_strings_are_streamed_and_only_they() -> None:
    reading = parser()
    reading.feed("<tool_call>\n<function=f>\n<parameter=s>\n")
    assert reading.feed("a <") == [CallDelta(0, '"a ')]
    assert reading.feed('b> "\n') == [CallDelta(0, '<b> \\"')]
    assert reading.feed("\n</para") == [CallDelta(0, "\\n")]
    assert reading.feed("meter>") == [CallDelta(0, '"')]
    assert reading.feed("\n<parameter=o>\n{") == [CallDelta(0, ', "o": ')]
    assert reading.feed('"a": 1}\n</parameter>') == [CallDelta(0, '{"a": 1}')]
    assert reading.feed("\n</function>") == [CallDelta(0, "}")]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "", "{}"),
        ("<tool_call><function=f></function></tool_call> b", "b", "{}"),
        ("a\n<tool_call>\n<function=f>\n</tool_call>\nb", "a\nb", "{}"),
        ("<tool_call>\n<function=f>\noops</function>\n</tool_call>", "oops</function>\n</tool_call>", "{}"),
        ("<tool_call>\n<function=f>\n<parameter=s>\na", "", '{"s": "a"}'),
        ("<tool_call>\n<function=f>\n<parameter=s\n>a", "", '{"s": ">a"}'),
        ("<tool_call>\n<function=f>\n<parameter=\na", "a", "{}"),
    ],
)
def test_mistakes(text: str, content: str, arguments: str) -> None:
    found = answer(parser(), text)
    assert ([call.arguments for call in found.calls], found.content) == ([arguments], content)
    assert shape(answer(parser(), *text)) == shape(found)

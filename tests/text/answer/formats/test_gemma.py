"""Calls of Gemma 4: bare keys, strings in quotes that are a token, nested values, and mistakes."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from aengine.errors import InvalidRequestError
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import CallDelta
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.grammar.calls import CallGrammar
from tests.text.byte_grammars import MARKERS, accepts
from tests.text.cutting import answer, shape

Q = '<|"|>'


def parser() -> ToolCallParser:
    return ToolCallParser(FORMATS["gemma4"], {"f": None})


def call(members: str) -> str:
    return f"<|tool_call>call:f{{{members}}}<tool_call|>"


@pytest.mark.parametrize(
    ("members", "value"),
    [
        ("", {}),
        (f's:{Q}a "b" \\ {{c}}\n{Q}', {"s": 'a "b" \\ {c}\n'}),
        (f"s:{Q}{Q},i:-5,f:1.5,b:true,n:null", {"s": "", "i": -5, "f": 1.5, "b": True, "n": None}),
        (f"l:[1,[{Q}a{Q}],[]],o:{{a:{{}},b:{{c:false}}}}", {"l": [1, ["a"], []], "o": {"a": {}, "b": {"c": False}}}),
        (f"{Q}a b{Q} : 1 , c : [ 1 , 2 ]", {"a b": 1, "c": [1, 2]}),
        ("city:Paris,none:None,x:1e999,y:NaN", {"city": "Paris", "none": None, "x": float("inf"), "y": "NaN"}),
    ],
)
def test_values(members: str, value: dict[str, Any]) -> None:
    for fragments in ([call(members)], list(call(members))):
        (found,) = answer(parser(), *fragments).calls
        assert json.loads(found.arguments) == value


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"I look.{call('')}{call('a:1')}", "I look.", [("f", "{}"), ("f", '{"a": 1}')]),
        (call("a:[1}"), "}}<tool_call|>", [("f", '{"a": [1]}')]),
        ("<|tool_call>call:f{a:1", "", [("f", '{"a": 1}')]),
        ("<|tool_call>call:g{a:1}<tool_call|>", "<|tool_call>call:g{a:1}<tool_call|>", []),
        ("<|tool_call>f{}<tool_call|>", "<|tool_call>f{}<tool_call|>", []),
    ],
)
def test_mistakes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert shape(answer(parser(), text)) == ("", content, calls)
    assert shape(answer(parser(), *text)) == ("", content, calls)


def test_strings_are_streamed() -> None:
    reading = parser()
    reading.feed(f"<|tool_call>call:f{{s:{Q}")
    assert reading.feed("a <") == [CallDelta(0, "a")]
    assert reading.feed('b"') == [CallDelta(0, ' <b\\"')]
    assert reading.feed("}") == []  # closes the object if the quote is missing
    assert reading.feed(Q) == [CallDelta(0, '}"')]


@pytest.mark.parametrize("special", [False, True])
def test_lists_have_as_many_items_as_they_may(special: bool) -> None:
    schema = {"type": "object", "properties": {"l": {"type": "array", "minItems": 1, "maxItems": 3, "items": {}}}}
    tools = [CallableTool("f", schema, strict=True)]
    grammar = CallGrammar(tools, FORMATS["gemma4"], tokens=MARKERS if special else {}).forced()
    for items in ("1", "1,true", f"{Q}a{Q},[],{{a:null}}"):
        assert accepts(grammar, call(f"l:[{items}]"), special), items
    for items in ("", "1,2,3,4", "1,"):
        assert not accepts(grammar, call(f"l:[{items}]"), special), items


MANY = {f"x{index}": {"$ref": "#/$defs/a"} for index in range(20)}
BOMBS: dict[str, dict[str, Any]] = {
    "references to itself": {
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"type": "object", "properties": MANY}},
    },
    "many items": {"properties": {"x": {"type": "array", "minItems": 10**9}}},
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_what_has_no_end_is_not_looked_into(name: str) -> None:
    begin = time.process_time()
    CallGrammar([CallableTool("f", BOMBS[name], where="tools[0]")], FORMATS["gemma4"]).forced()
    with pytest.raises(InvalidRequestError):
        CallGrammar([CallableTool("f", BOMBS[name], strict=True, where="tools[0]")], FORMATS["gemma4"]).forced()
    assert time.process_time() - begin < 2

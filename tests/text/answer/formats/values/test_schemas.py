"""Parameters are read from schemas, within bounds on the work."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from aengine.config import CallFormatName
from aengine.errors import InvalidRequestError
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.answer.formats.values.schemas import EVERYTHING, alternatives, kinds_of
from aengine.text.grammar.calls import CallGrammar

TEXT = {"type": "string", "description": "x" * 100_000}
BOMBS: dict[str, dict[str, Any]] = {
    "alternatives within each other": {
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 10}},
    },
    "a reference to itself": {"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "large definitions": {
        "properties": {f"x{index}": {"$ref": "#/$defs/a"} for index in range(2000)},
        "$defs": {"a": TEXT},
    },
    "a deep pattern": {"properties": {"x": {"type": "string", "pattern": "(" * 50_000 + ")" * 50_000}}},
}


CHAIN = {"b": {"$ref": "#/definitions/c"}, "c": {"type": "array"}}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({}, EVERYTHING),
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, 1.5, True, None, [], {}]}, {*EVERYTHING}),
        ({"type": "string", "enum": ["a", "b"]}, {"string"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, {"const": 2}]}]}, {"string", "null", "integer"}),
        ({"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, {"string"}),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "boolean"}}}, {"boolean"}),
        ({"$ref": "#/definitions/b", "definitions": CHAIN}, {"array"}),
        ({"$ref": "#/$defs/missing"}, EVERYTHING),
        ({"type": "nothing"}, EVERYTHING),
    ],
)  # fmt: skip
def test_the_kinds_of_a_value(schema: dict[str, Any], kinds: set[str]) -> None:
    assert kinds_of(alternatives(schema)) == kinds


@pytest.mark.parametrize("form", list(FORMATS))
@pytest.mark.parametrize("name", list(BOMBS))
def test_what_is_too_much_is_left_alone_or_refused(form: CallFormatName, name: str) -> None:
    begin = time.process_time()
    for strict in (False, True):
        refused = pytest.raises(InvalidRequestError, match=r"^tools\[0\].{1,300}$")
        with suppress(InvalidRequestError), refused if strict and form == "qwen3_coder" else nullcontext():
            CallGrammar([CallableTool("f", BOMBS[name], strict, "tools[0]")], FORMATS[form]).forced()
    ToolCallParser(FORMATS[form], {"f": BOMBS[name]}).feed("<tool_call><function=f><parameter=x>")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"not": {"type": "null"}}}}, "tools[0].properties.a"),
        ({"properties": {"a": {"type": "string", "not": {"const": "b"}}}}, "tools[0].properties.a.not"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=b)"}}}, "tools[0].properties.a.pattern"),
        ({"properties": {"a": {"enum": ["x</parameter>"]}}}, "tools[0].properties.a"),
        ({"properties": {"a>": {}}}, "tools[0].properties.a>"),
        ({"minProperties": 1}, "tools[0].minProperties"),
    ],
)
def test_what_xml_cannot_be_held_to_is_refused_where_it_is_strict(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        CallGrammar([CallableTool("f", schema, strict=True, where="tools[0]")], FORMATS["qwen3_coder"]).forced()
    assert refused.value.param == place

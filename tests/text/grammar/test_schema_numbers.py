"""Numbers get an end where a schema gives them none; what it does say stays."""

from __future__ import annotations

from typing import Any

import pytest

from aengine.text.grammar.schema_numbers import FINEST, LARGEST, bounded_numbers

INTEGER = {"type": "integer", "minimum": -LARGEST, "maximum": LARGEST}
NUMBER = {"type": "number", "minimum": -LARGEST, "maximum": LARGEST, "multipleOf": FINEST}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, INTEGER),
        ({"type": "number"}, NUMBER),
        ({"type": ["null", "integer"]}, {**INTEGER, "type": ["null", "integer"]}),
        ({"type": "string"}, {"type": "string"}),
        ({"type": "integer", "minimum": 3}, {"type": "integer", "minimum": 3, "maximum": LARGEST}),
        ({"type": "integer", "exclusiveMaximum": 3}, {"type": "integer", "minimum": -LARGEST, "exclusiveMaximum": 3}),
        ({"type": "integer", "minimum": 10**18}, {"type": "integer", "minimum": 10**18}),
        ({"type": "number", "minimum": 0, "maximum": 1}, {**NUMBER, "minimum": 0, "maximum": 1}),
        (
            {"type": "number", "minimum": 0, "maximum": 1e-12},
            {"type": "number", "minimum": 0, "maximum": 1e-12},
        ),
        ({"type": "number", "multipleOf": 0.5}, {**NUMBER, "multipleOf": 0.5}),
        ({"type": "number", "allOf": [{"minimum": 10**19}]}, {"type": "number", "allOf": [{"minimum": 10**19}]}),
        ({"enum": [{"type": "integer"}]}, {"enum": [{"type": "integer"}]}),
        ({"not": {"type": "integer"}}, {"not": {"type": "integer"}}),
        ({"items": {"type": "integer"}}, {"items": INTEGER}),
        ({"items": False}, {"items": False}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"anyOf": [INTEGER, {"type": "null"}]}),
        ({"properties": {"type": {"type": "number"}}}, {"properties": {"type": NUMBER}}),
        ({"$defs": {"a": {"prefixItems": [{"type": "integer"}]}}}, {"$defs": {"a": {"prefixItems": [INTEGER]}}}),
        ({"properties": "nonsense", "anyOf": 3}, {"properties": "nonsense", "anyOf": 3}),
        ({"type": "integer", "minimum": "nonsense"}, {"type": "integer", "minimum": "nonsense", "maximum": LARGEST}),
    ],
)
def test_what_is_open_gets_an_end(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(schema)
    assert bounded_numbers(schema) == expected
    assert repr(schema) == before

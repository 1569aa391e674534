"""Rewritten schemas: the compiler knows every type of pydantic, and numbers are bounded."""

from __future__ import annotations

import itertools
import json
import random
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import numpy as np
import pytest
from llguidance import LLMatcher
from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    Field,
    IPvAnyAddress,
    IPvAnyInterface,
    IPvAnyNetwork,
    SecretBytes,
    SecretStr,
    TypeAdapter,
    create_model,
)

from aengine.config import CallFormatName
from aengine.errors import InvalidRequestError
from aengine.requests.structured import Structured
from aengine.text.answer.formats.base import CallableTool
from aengine.text.answer.formats.table import FORMATS
from aengine.text.grammar.calls import CallGrammar
from aengine.text.grammar.schemas import FINEST, LARGEST, bounded_numbers, compilable_schema, decimal_pattern
from aengine.text.grammar.source import GrammarLimits, grammar_source
from tests.one_in import one_in
from tests.text.byte_grammars import TOKENIZER, accepts, call


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    y: float | None = None
    color: Color = Color.RED


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")]


TYPES: dict[str, tuple[Any, str]] = {  # with a value of each
    "set": (set[str], '["a", "b"]'),
    "frozenset": (Annotated[frozenset[int], Field(min_length=1, max_length=3)], "[1, 2]"),
    "path": (Path, '"/tmp/a b"'),
    "bytes": (bytes, '"abc"'),
    "secret": (SecretStr, '"pass"'),
    "secret bytes": (SecretBytes, '"pass"'),
    "ipv4": (IPv4Address, '"127.0.0.1"'),
    "ipv6": (IPv6Address, '"::1"'),
    "ipv4 network": (IPv4Network, '"10.0.0.1"'),
    "ipv4 interface": (IPv4Interface, '"10.0.0.1"'),
    "ipv6 network": (IPv6Network, '"fe80::1"'),
    "ipv6 interface": (IPv6Interface, '"fe80::1"'),
    "ip address": (IPvAnyAddress, '"127.0.0.1"'),
    "ip network": (IPvAnyNetwork, '"::1"'),
    "ip interface": (IPvAnyInterface, '"::1"'),
    "decimal": (Decimal, '"1.5"'),
    "base64": (Base64Bytes, '"YWJj"'),
    "uuid": (UUID, '"12345678-1234-4234-9234-123456789abc"'),
    "uuid4": (UUID4, '"12345678-1234-4234-9234-123456789abc"'),
    "timedelta": (timedelta, '"P1DT2H"'),
    "url": (AnyUrl, '"http://a.example/b"'),
    "optional": (str | None, "null"),
    "literal": (Literal["a", 1, True, None], "true"),
    "enum": (Color, '"blue"'),
    "string": (Annotated[str, Field(min_length=1, max_length=5, pattern="^[a-z]+$")], '"abc"'),
    "list": (Annotated[list[int], Field(min_length=1, max_length=3)], "[1]"),
    "number": (Annotated[int, Field(ge=0, lt=100, multiple_of=5)], "95"),
    "nested": (list[Point], '[{"x": 1, "y": null, "color": "red"}]'),
    "dict": (dict[str, Decimal], '{"a": 1.5}'),
    "tuple": (tuple[int, str], '[1, "a"]'),
    "union": (int | list[set[int]] | None, "[[1]]"),
    "tagged union": (Annotated[Cat | Dog, Field(discriminator="kind")], '{"kind": "cat", "lives": 9}'),
    "datetime": (datetime, '"2024-02-29T12:00:00Z"'),
    "date": (date, '"2024-02-29"'),
    "time": (time, '"12:00:00Z"'),
}
BOUND = [kind for kind in TYPES if kind not in ("set", "frozenset", "union")]  # types that strict schemas can enforce


def source(schema: dict[str, Any], *, strict: bool = False) -> str:
    return grammar_source(Structured(json=schema, strict=strict, origin="response_format"), GrammarLimits())


def drawn(matcher: LLMatcher, seed: int) -> str:
    """Draw an output from the masks alone. It ends as soon as possible once it is long."""
    rng, output = random.Random(seed), bytearray()
    for _ in range(3000):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = set(np.nonzero(mask)[0].tolist())
        if allowed == {256}:
            return output.decode()
        ends = allowed & set(b'"}]')
        plain = allowed & set(range(33, 127))
        token = rng.choice(sorted(ends if ends and rng.random() < 0.3 else plain - {92} or allowed - {256}))
        matcher.consume_token(token)
        output.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize("kind", list(TYPES))
def test_whatever_is_drawn_is_what_pydantic_takes(kind: str) -> None:
    model = create_model("Model", value=(TYPES[kind][0], ...))
    text = source(model.model_json_schema(), strict=kind in BOUND)
    for seed in range(4):
        model.model_validate_json(drawn(LLMatcher(TOKENIZER, LLMatcher.grammar_from_lark(text)), seed))


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("kind", list(TYPES))
def test_every_type_is_known(kind: str, mode: Literal["validation", "serialization"]) -> None:
    type_, value = TYPES[kind]
    schema = TypeAdapter(type_).json_schema(mode=mode)
    if mode == "validation":
        assert accepts(source(schema), value)
    else:
        assert LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(source(schema)), TOKENIZER) == ""


@pytest.mark.parametrize("year", ["0000", "0001", "1900", "2000", "2023", "2024", "9999"])
def test_dates_are_days_of_the_calendar(year: str) -> None:
    text = source({"type": "string", "format": "date"}, strict=True)
    for month, day in itertools.product((0, 1, 2, 4, 6, 9, 11, 12, 13), (0, 1, 28, 29, 30, 31, 32)):
        written = f"{year}-{month:02}-{day:02}"
        try:
            date.fromisoformat(written)
        except ValueError:
            assert not accepts(text, f'"{written}"')
        else:
            assert accepts(text, f'"{written}"')


@pytest.mark.parametrize(
    ("beside", "null"),
    [
        ({}, True),
        ({"type": ["string", "null"]}, True),
        ({"type": "string", "pattern": "^2024"}, False),
        ({"type": "string", "maxLength": 10}, False),
        ({"enum": ["2024-02-29"]}, False),
        ({"const": "2024-02-29"}, False),
    ],
)
def test_what_stands_beside_a_date_holds_as_well(beside: dict[str, Any], null: bool) -> None:
    text = source({"format": "date", **beside}, strict=True)
    assert accepts(text, '"2024-02-29"')
    assert not accepts(text, '"2024-2-29"')
    assert accepts(text, "null") == null


PREFIX = r"^(?!^[-+.]*$)[+-]?0*"
PLAIN, BOTH = PREFIX + r"\d*\.?\d*$", PREFIX + r"(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
DIGITS, PLACES = PREFIX + r"(?:\d{0,5}|(?=[\d.]{1,6}0*$)\d*\.\d*0*$)", PREFIX + r"\d*\.?\d{0,2}0*$"
NO_WHOLE = PREFIX + r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)"


@pytest.mark.parametrize("pattern", [PLAIN, BOTH, DIGITS, PLACES, NO_WHOLE])
def test_decimal_patterns_of_older_versions(pattern: str) -> None:
    parts = itertools.product(("", "-", "+"), ("", "0", "1", "12", "123", "12345"), ("", "."), ("", "5", "25", "125"))
    written = ["".join(each) for each in parts]
    both = [(text, re.match(pattern, text) is not None, re.match(decimal_pattern(pattern), text)) for text in written]
    assert all(meant for _, meant, ours in both if ours is not None)
    for text, _, ours in both:
        if text in ("0.25", "-.5", "+.25"):
            assert ours is not None
    grammar = source({"type": "string", "pattern": pattern}, strict=True)
    assert accepts(grammar, '"-0.5"')
    assert not accepts(grammar, '"."')


def test_a_format_that_nobody_knows_is_an_annotation_unless_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"format": "phone"}}}, "additionalProperties": False}
    assert accepts(source(schema), '{"a":["+1"]}')
    with pytest.raises(InvalidRequestError, match="'phone' is not known") as refused:
        source(schema, strict=True)
    assert refused.value.param == "response_format.properties.a.items.format"


def test_unique_items_are_nobodys_to_check_unless_strict() -> None:
    schema = {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}]}
    assert accepts(source(schema), "[1,1]")
    with pytest.raises(InvalidRequestError, match="unique items") as refused:
        source(schema, strict=True)
    assert refused.value.param == "response_format.anyOf[0].uniqueItems"
    assert compilable_schema({"uniqueItems": False}, "a", strict=True) == {}


def test_what_is_called_like_a_keyword_is_none() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string"}, "uniqueItems": {"const": True}}}
    assert compilable_schema(schema, "a", strict=True) == schema
    assert compilable_schema({"enum": [{"format": "phone"}]}, "a", strict=True) == {"enum": [{"format": "phone"}]}


@pytest.mark.parametrize("form", one_in(3, FORMATS))
def test_arguments_of_every_type(form: CallFormatName) -> None:
    for kind, (type_, value) in TYPES.items():
        schema = create_model("Model", value=(type_, ...)).model_json_schema()
        tool = CallableTool("f", schema, strict=kind in BOUND, where="tools[0].function.parameters")
        grammar = CallGrammar([tool], FORMATS[form]).forced()
        assert accepts(grammar, call("f", json.dumps({"value": json.loads(value)}), form)), kind


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_strict_tools_unknown_format_is_refused_by_its_place(form: CallFormatName) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "phone"}}}
    with pytest.raises(InvalidRequestError) as refused:
        CallGrammar([CallableTool("f", schema, strict=True, where="tools[0]")], FORMATS[form]).forced()
    assert refused.value.param == "tools[0].properties.a.format"
    CallGrammar([CallableTool("f", schema, where="tools[0]")], FORMATS[form]).forced()


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

"""Grammar rules of values as Gemma 4 writes them: bare keys, and quotes that are a token."""

from __future__ import annotations

import json
import re

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, Schema
from aengine.text.answer.formats.values.raw_rules import raw_text
from aengine.text.answer.formats.values.schemas import (
    ANNOTATIONS,
    DEFINITIONS,
    OBJECT_KEYWORDS,
    alternatives,
    parameters_of,
    undeclared_schema,
    unwritable_name,
)
from aengine.text.answer.lark import Tokens, avoiding, json_value, literal, marker, place, separated, sequence

QUOTE = '<|"|>'
_KEY = re.compile(r"[^\s,:<>{}\[\]\"]+")
_MAX_DEPTH = 8  # of objects and lists with their own schemas; deeper values may be anything
_LIST_KEYWORDS = {"type", "items", "minItems", "maxItems", *DEFINITIONS}
_MAX_COUNT = 1000  # of items; larger bounds are not enforced
_MAX_NESTED = 200  # most lists and objects whose schemas are described


class GemmaRules:
    """Rules of the arguments of one tool. If it is not strict, the client must check bounds of lists and objects."""

    def __init__(self, tool: CallableTool, tokens: Tokens) -> None:
        self._tool = tool
        self._quote = marker(QUOTE, tokens)
        self._quote_is_text = QUOTE not in tokens  # then the terminal of a text includes its closing quote
        self._left = _MAX_NESTED
        self.rules: list[str] = []

    def members(self, rule: str, schema: Schema, where: str, depth: int = 0) -> None:
        """Add rules in which `rule` describes an object's members, sorted by name, as models see them."""
        self._check(schema, OBJECT_KEYWORDS, where)
        parameters = sorted(parameters_of(schema), key=lambda parameter: parameter.name.lower())
        for index, (name, value, _) in enumerate(parameters):
            one, path = f"{rule}_{index}", f"{where}.properties.{name}"
            if _KEY.fullmatch(name) is None:
                raise unwritable_name(path)
            self.rules.append(f"{one}: {literal(f'{name}:')} {one}_value")
            self._value(f"{one}_value", value, path, depth)
        end = '""'
        if (further := undeclared_schema(schema)) is not None:
            member = f'/[A-Za-z_][A-Za-z0-9_.-]*/ ":" {rule}_any'
            end = f'({member} ("," {member})*)?'
            self._value(f"{rule}_any", further, f"{where}.additionalProperties", depth)
        self.rules += separated(rule, [parameter.required for parameter in parameters], '","', end)

    def _value(self, rule: str, schema: Schema, where: str, depth: int) -> None:
        options: list[str] = []
        for index, each in enumerate(alternatives(schema)):
            name = f"{rule}_{index}"
            if isinstance(each.get("enum"), list):
                options += [self._written(value) for value in each["enum"]]
                continue
            match each.get("type"):
                case "string":
                    options.append(self._string(name, raw_text(each, self._tool, where), where))
                case "boolean":
                    options += ['"true"', '"false"']
                case "null":
                    options.append('"null"')
                case "integer" | "number":
                    options.append(name)
                    self.rules.append(f"{name}: {json_value(each, where, lenient=not self._tool.strict)}")
                case "array" if self._may_describe(depth):
                    options.append(name)
                    self._list(name, each, where, depth + 1)
                case "object" if self._may_describe(depth):
                    options.append(f'"{{" {name} "}}"')
                    self.members(name, each, where, depth + 1)
                case _:
                    self._check(schema, set(), where)
                    options = ["gemma_any"]
                    self._anything()
                    break
        if not options:
            raise InvalidRequestError(f"{where}: none of its values can be written in this model's format", where)
        self.rules.append(f"{rule}: {' | '.join(dict.fromkeys(options))}")

    def _list(self, name: str, schema: Schema, where: str, depth: int) -> None:
        first = schema.get("prefixItems")
        if isinstance(first, list) and first and schema.get("minItems") == schema.get("maxItems") == len(first):
            definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
            for index, each in enumerate(first):
                given = {**definitions, **each} if isinstance(each, dict) else {}
                self._value(f"{name}_item_{index}", given, where, depth)
            items = ' "," '.join(f"{name}_item_{index}" for index in range(len(first)))
            self.rules.append(f'{name}: "[" {items} "]"')
            return
        self._check(schema, _LIST_KEYWORDS, where)
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not all(count is None or (isinstance(count, int) and 0 <= count <= _MAX_COUNT) for count in (least, most)):
            self._check({"minItems": least, "maxItems": most}, {"type"}, where)
            least, most = 0, None
        one = f"{name}_item"
        items = f'{one} ("," {one}){{{max(least - 1, 0)},{"" if most is None else max(most - 1, 0)}}}'
        self.rules.append(f'{name}: "[" {"" if most == 0 else items if least else f"({items})?"} "]"')
        each, definitions = schema.get("items"), {key: schema[key] for key in DEFINITIONS if key in schema}
        self._value(one, {**definitions, **each} if isinstance(each, dict) else {}, where, depth)

    def _may_describe(self, depth: int) -> bool:
        """Count a list or an object, and return whether its schema is described. Schemas may refer to themselves."""
        self._left -= 1
        return depth < _MAX_DEPTH and self._left > 0

    def _string(self, name: str, text: str, where: str) -> str:
        """Return the rule's text for a string. text: the terminal of its content."""
        self._raw()
        terminal = name.upper()
        end = literal(QUOTE) if self._quote_is_text else ""
        self.rules.append(f"{terminal}: {sequence(text, end)}{place(where)}")
        return f"{self._quote} {terminal}" if self._quote_is_text else f"{self._quote} {terminal}? {self._quote}"

    def _written(self, value: object) -> str:
        """Return a listed value. Texts within lists and objects are quoted as well."""
        if isinstance(value, str):
            return sequence(self._quote, literal(value), self._quote)
        if isinstance(value, list):
            return sequence('"["', ' "," '.join(map(self._written, value)), '"]"')
        if isinstance(value, dict):
            members = [f"{literal(f'{key}:')} {self._written(each)}" for key, each in sorted(value.items())]
            return sequence('"{"', ' "," '.join(members), '"}"')
        return literal(json.dumps(value))

    def _anything(self) -> None:
        self._raw()
        end = literal(QUOTE) if self._quote_is_text else ""
        string = f"{self._quote} GEMMA_TEXT" if self._quote_is_text else f"{self._quote} GEMMA_TEXT? {self._quote}"
        member = '/[A-Za-z_][A-Za-z0-9_.-]*/ ":" gemma_any'
        self.rules += [
            f"GEMMA_TEXT: {sequence('RAW', end)}",
            f'gemma_any: {string} | gemma_number | "true" | "false" | "null" | gemma_list | gemma_object',
            'gemma_list: "[" (gemma_any ("," gemma_any)*)? "]"',
            f'gemma_object: "{{" ({member} ("," {member})*)? "}}"',
            r"gemma_number: /-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,9})?/",
        ]

    def _raw(self) -> None:
        self.rules.append(f"RAW: /{avoiding(QUOTE)}/")

    def _check(self, schema: Schema, known: set[str], where: str) -> None:
        unknown = [key for key in schema if key not in known | ANNOTATIONS | {"discriminator"}]
        if self._tool.strict and unknown:
            path = f"{where}.{unknown[0]}" if known else where
            raise InvalidRequestError(f"{path} cannot be enforced in this model's format of calls", path)

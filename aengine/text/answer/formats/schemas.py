"""What formats that are not JSON need of a tool's schema: its parameters, and the kinds that a value may be of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, Schema, object_schema

Kind = Literal["string", "number", "integer", "boolean", "null", "array", "object"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERYTHING = frozenset(KINDS)

_DEFINITIONS = ("$defs", "definitions")
_OF_AN_OBJECT = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
_MAX_DEPTH = 16  # of references and alternatives within each other; what lies deeper may be anything


class Parameter(NamedTuple):
    """One of a tool's parameters. Its schema brings the definitions that it refers to."""

    name: str
    schema: Schema
    required: bool


def parameters_of(schema: Schema | None) -> list[Parameter]:
    """The declared parameters, in the schema's order; those that are required and not declared come last."""
    whole = _resolved(schema or {})
    properties, required = whole.get("properties"), whole.get("required")
    declared = properties if isinstance(properties, dict) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    found = [Parameter(name, _with_definitions(value, whole), name in names) for name, value in declared.items()]
    return found + [Parameter(name, {}, True) for name in dict.fromkeys(names) if name not in declared]


def further_of(schema: Schema | None) -> Schema | None:
    """The schema of parameters that are not declared. None: there may be none, or it declares some."""
    whole = _resolved(schema or {})
    if whole.get("properties") or whole.get("required") or whole.get("additionalProperties") is False:
        return None
    return _with_definitions(whole.get("additionalProperties"), whole)


def check_strict(tool: CallableTool) -> None:
    """Raise `InvalidRequestError`, naming the place, where a strict tool's arguments are bound in more ways than by
    the schemas of its parameters.
    """
    if tool.strict:
        for key in _resolved(object_schema(tool)):
            if key not in _OF_AN_OBJECT | _ANNOTATIONS:
                path = f"{tool.where}.{key}"
                raise InvalidRequestError(f"{path} cannot be enforced in this model's format of calls", path)


def alternatives(schema: Schema, depth: int = 0) -> list[Schema]:
    """Schemas of one kind each, of which a value must match one; an empty one for what may be anything."""
    schema = _resolved(schema)
    if depth > _MAX_DEPTH:
        return [{}]
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and options and (key != "allOf" or len(options) == 1):
            rest = {name: value for name, value in schema.items() if name != key}
            branches = [_joined(rest, option) for option in options]
            return [each for branch in branches for each in alternatives(branch, depth + 1)]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kinds = dict.fromkeys(kind_of(value) for value in values)
        return [{"type": kind, "enum": [value for value in values if kind_of(value) == kind]} for kind in kinds]
    kind = schema.get("type")
    if isinstance(kind, list):
        return [{**schema, "type": each} for each in kind if each in EVERYTHING] or [{}]
    return [schema] if kind in EVERYTHING else [{}]


def kinds_of(schemas: Iterable[Schema]) -> frozenset[Kind]:
    """The kinds that values of one of these, as `alternatives` has them, are of."""
    found: set[Kind] = set()
    for schema in schemas:
        found |= {schema["type"]} if "type" in schema else EVERYTHING
    return frozenset(found)


def kind_of(value: object) -> Kind:
    """What JSON schemas call a value; a number without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list():
            return "array"
        case _:
            return "object"


def _resolved(schema: Schema) -> Schema:
    """The schema that it refers to, with what stands beside the reference."""
    for _ in range(_MAX_DEPTH):
        path = schema.get("$ref")
        if not isinstance(path, str):
            return schema
        target = dict(_definitions(schema)).get(path)
        if not isinstance(target, dict):
            return {}
        schema = {**target, **{name: value for name, value in schema.items() if name != "$ref"}}
    return {}


def _definitions(schema: Schema) -> Iterator[tuple[str, object]]:
    for place in _DEFINITIONS:
        defined = schema.get(place)
        for name, value in (defined if isinstance(defined, dict) else {}).items():
            yield f"#/{place}/{name}", value


def _with_definitions(schema: object, whole: Schema) -> Schema:
    if not isinstance(schema, dict):
        return {}
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{place: whole[place] for place in _DEFINITIONS if place in whole}}


def _joined(rest: dict[str, Any], option: object) -> Schema:
    return {**rest, **option} if isinstance(option, dict) else rest

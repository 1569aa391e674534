"""Reads a tool's JSON schema for formats that are not JSON: its parameters, and the kinds of their values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, Schema, object_schema

Kind = Literal["string", "number", "integer", "boolean", "null", "array", "object"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EVERYTHING = frozenset(KINDS)

DEFINITIONS = ("$defs", "definitions")
OBJECT_KEYWORDS = {"type", "properties", "required", "additionalProperties", *DEFINITIONS}
ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
_MAX_DEPTH = 16  # of references to references
_MAX_ALTERNATIVES = 64  # of one value; with more of them it may be anything
_LONGEST = 2**20  # characters of definitions, repeated for each parameter


class Parameter(NamedTuple):
    """One of a tool's parameters. Its schema includes the definitions that it refers to."""

    name: str
    schema: Schema
    required: bool


def parameters_of(schema: Schema | None) -> list[Parameter]:
    """Return the declared parameters in the schema's order, then those that are required but not declared."""
    whole = _resolved(schema or {})
    properties, required = whole.get("properties"), whole.get("required")
    declared = properties if isinstance(properties, dict) else {}
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    found = [Parameter(name, _with_definitions(value, whole), name in names) for name, value in declared.items()]
    return found + [Parameter(name, {}, True) for name in dict.fromkeys(names) if name not in declared]


def undeclared_schema(schema: Schema | None) -> Schema | None:
    """Return the schema of undeclared parameters; None if none are allowed, or some are declared."""
    whole = _resolved(schema or {})
    if whole.get("properties") or whole.get("required") or whole.get("additionalProperties") is False:
        return None
    return _with_definitions(whole.get("additionalProperties"), whole)


def check_parameters(tool: CallableTool) -> None:
    """Raise `InvalidRequestError`, naming the place, if the parameters' own schemas cannot express the tool's schema.

    Strict tools must have no further bounds on the object. Definitions must not be too large to be repeated for each
    parameter.
    """
    whole = _resolved(object_schema(tool))
    for key in whole:
        if tool.strict and key not in OBJECT_KEYWORDS | ANNOTATIONS:
            path = f"{tool.where}.{key}"
            raise InvalidRequestError(f"{path} cannot be enforced in this model's format of calls", path)
    references = sum(any(place in parameter.schema for place in DEFINITIONS) for parameter in parameters_of(whole))
    if references * len(json.dumps([whole.get(place) for place in DEFINITIONS])) > _LONGEST:
        raise InvalidRequestError(
            f"{tool.where}: its definitions are too large for {references} parameters that refer to them", tool.where
        )


def unwritable_name(where: str) -> InvalidRequestError:
    """Return the error for a parameter whose name the format cannot write."""
    return InvalidRequestError(f"{where}: the name cannot be written in this model's format of calls", where)


def alternatives(schema: Schema) -> list[Schema]:
    """Return schemas of one kind each. A value must match one of them. An empty schema allows anything."""
    found: list[Schema] = []
    left = [schema]
    for _ in range(_MAX_ALTERNATIVES):
        if not left:
            return found
        each = _resolved(left.pop(0))
        branches = _branches(each)
        if branches is not None:
            left = [*branches, *left]
        else:
            found += [each] if each.get("type") in EVERYTHING else [{}]
    return [{}]


def _branches(schema: Schema) -> list[Schema] | None:
    """Return the listed alternatives of a schema; None if it lists none."""
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list) and 0 < len(options) <= (1 if key == "allOf" else _MAX_ALTERNATIVES):
            rest = {name: value for name, value in schema.items() if name != key}
            return [_joined(rest, option) for option in options]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    kind = schema.get("type")
    if isinstance(values, list) and not (isinstance(kind, str) and "const" not in schema):
        kinds = dict.fromkeys(kind_of(value) for value in values)
        return [{"type": kind, "enum": [value for value in values if kind_of(value) == kind]} for kind in kinds]
    if isinstance(kind, list):
        return [{**schema, "type": each} for each in kind if each in EVERYTHING] or [{}]
    return None


def kinds_of(schemas: Iterable[Schema]) -> frozenset[Kind]:
    """Return the kinds of values that these schemas, results of alternatives(), allow."""
    found: set[Kind] = set()
    for schema in schemas:
        found |= {schema["type"]} if "type" in schema else EVERYTHING
    return frozenset(found)


def kind_of(value: object) -> Kind:
    """Return the kind of a value in the terms of JSON schemas. A number without a fraction is an integer."""
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
    """Return the schema that a reference names, with the keywords next to the reference."""
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
    for place in DEFINITIONS:
        defined = schema.get(place)
        for name, value in (defined if isinstance(defined, dict) else {}).items():
            yield f"#/{place}/{name}", value


def _with_definitions(schema: object, whole: Schema) -> Schema:
    if not isinstance(schema, dict):
        return {}
    if '"$ref"' not in json.dumps(schema):
        return schema
    return {**schema, **{place: whole[place] for place in DEFINITIONS if place in whole}}


def _joined(rest: dict[str, Any], option: object) -> Schema:
    return {**rest, **option} if isinstance(option, dict) else rest

"""Every field of the request structs, read off the structs themselves, so that a new one cannot be forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from msgspec import inspect

from aengine.http.native.generate import GenerateRequest
from aengine.http.openai.bodies import ChatRequest, CompletionRequest

BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hi", "max_tokens": 1, "stream": False},
    "/v1/completions": {"prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "logprobs": True},
}
# The endpoints for each input. The first is quick, the others are slow tests.
ONE_OF_ALL = [pytest.param(path, marks=pytest.mark.slow if number else ()) for number, path in enumerate(BODIES)]
STRUCTS = {"/generate": GenerateRequest, "/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}


class Field(NamedTuple):
    """A place in a body: its path in errors, the kinds of JSON it accepts, and the JSON around it."""

    endpoint: str
    name: str
    kinds: frozenset[str]
    before: str
    after: str
    tells: bool = False  # its value selects one of several structs; msgspec then does not report the type it got

    def body(self, value: str | bytes) -> bytes:
        """The endpoint's plain body with `value`, as it is, at this place."""
        top = self.name.replace("[", ".").split(".")[0]
        others = {name: other for name, other in BODIES[self.endpoint].items() if name != top}
        if top in ("input_ids", "messages"):
            others.pop("prompt", None)
        raw = value if isinstance(value, bytes) else value.encode()
        return json.dumps(others).encode()[:-1] + b", " + self.before.encode() + raw + self.after.encode() + b"}"


def fields(endpoint: str) -> list[Field]:
    """All of an endpoint's, nested ones too."""
    kind = inspect.type_info(STRUCTS[endpoint])
    assert isinstance(kind, inspect.StructType)
    found = []
    for field in kind.fields:
        found += _walk(endpoint, field.type, field.encode_name, f'"{field.encode_name}": ', "")
    return found


def _walk(endpoint: str, kind: inspect.Type, name: str, before: str, after: str) -> Iterator[Field]:
    kind = _bare(kind)
    kinds = [_bare(one) for one in (kind.types if isinstance(kind, inspect.UnionType) else (kind,))]
    yield Field(endpoint, name, frozenset(_json_kind(one) for one in kinds), before, after)
    for one in kinds:
        match one:
            case inspect.ListType(item_type=item):
                yield from _walk(endpoint, item, f"{name}[0]", f"{before}[", f"]{after}")
            case inspect.DictType(value_type=value) if not isinstance(_bare(value), inspect.AnyType):
                yield from _walk(endpoint, value, name, f'{before}{{"5": ', f"}}{after}")
            case inspect.StructType(fields=inner, tag=tag):
                types = {field.encode_name: field.type for field in inner}
                if tag is not None:
                    types[str(one.tag_field)] = inspect.LiteralType((tag,))
                for inner_name, inner_kind in types.items():
                    others = _least(one)
                    others.pop(inner_name, None)
                    begin = json.dumps(others)[:-1] + (", " if others else "")
                    opened = f'{before}{begin}"{inner_name}": '
                    for found in _walk(endpoint, inner_kind, f"{name}.{inner_name}", opened, f"}}{after}"):
                        yield found._replace(tells=found.tells or (tag is not None and inner_name == one.tag_field))


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _json_kind(kind: inspect.Type) -> str:
    match kind:
        case inspect.IntType():
            return "int"
        case inspect.FloatType():
            return "float"
        case inspect.BoolType():
            return "bool"
        case inspect.StrType() | inspect.LiteralType():
            return "str"
        case inspect.NoneType():
            return "null"
        case inspect.ListType():
            return "array"
        case inspect.DictType() | inspect.StructType():
            return "object"
    raise TypeError(f"no kind of JSON: {kind}")


def _least(kind: inspect.Type) -> Any:
    """The least that fits a field that must be given."""
    match _bare(kind):
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.StrType():
            return "f"
        case inspect.ListType(item_type=item):
            return [_least(item)]
        case inspect.StructType(fields=inner, tag=tag, tag_field=tag_field):
            least = {field.encode_name: _least(field.type) for field in inner if field.required}
            return least if tag is None else {str(tag_field): tag, **least}
    raise TypeError(f"no example of {kind}")

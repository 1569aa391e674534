"""Strings that are written as they are, without quotes, and other values as JSON: rules of grammar for them."""

from __future__ import annotations

import json
import re

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, Schema
from aengine.text.answer.formats.raw_text import BEGINNINGS, WORDS, as_json
from aengine.text.answer.formats.schemas import Kind, alternatives, kinds_of
from aengine.text.answer.lark import avoiding, json_value, literal, place, sequence

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}  # as JSON schemas mean them
_KNOWN_ESCAPE = re.compile(r"\\[dw.+*?()\[\]{}|/^$-]")
_GROUP = re.compile(r"\[[^]]*\]|\((\?:)?[^()]*\)")


def raw_value_rules(rule: str, schema: Schema, stop: str, end: str, tool: CallableTool, where: str) -> list[str]:
    """Rules of which `rule` describes a value and the text behind it, `end`, of which `stop` is the beginning of no
    value's part. where: the schema's place in the request.
    """
    found = alternatives(schema)
    kinds = kinds_of(found)
    texts = f"{rule}_text".upper()
    raw = f"RAW: /{avoiding(stop)}/"  # the same for all values
    options: list[str] = []
    rules: list[str] = []
    for index, each in enumerate(found):
        name = f"{rule}_{index}"
        match each.get("type"):
            case _ if (written := _written(each, stop, kinds)) is not None:
                options += [literal(text + end) for text in written]
            case None:
                return [f"{rule}: {texts}", f"{texts}: RAW {literal(end)}", raw]
            case "string":
                options.append(name.upper())
                text = _text(each, kinds, tool, where)
                rules.append(f"{name.upper()}: {sequence(text, literal(end))}{place(where)}")
            case "boolean" | "null" as kind:
                options += [literal(word + end) for word, (meant, _) in WORDS.items() if meant == kind]
            case _:
                options.append(f"{name} {literal(end)}")
                rules.append(f"{name}: {json_value(each, where, lenient=not tool.strict)}")
    if not options:
        raise InvalidRequestError(f"{where}: none of its values can be written in this model's format of calls", where)
    return [f"{rule}: {' | '.join(options)}", *rules, raw]


def _written(schema: Schema, stop: str, kinds: frozenset[Kind]) -> list[str] | None:
    """The texts of the values that are listed, if any are; those that would be read as something else are left out."""
    values = schema.get("enum")
    if not isinstance(values, list):
        return None
    texts = [(value if isinstance(value, str) else json.dumps(value), value) for value in values]
    return [text for text, value in texts if stop not in text and json.loads(as_json(text, kinds)) == value]


def _text(schema: Schema, kinds: frozenset[Kind], tool: CallableTool, where: str) -> str:
    """A string as the schema has it, beginning like no value of the other kinds."""
    bounds = {key: schema[key] for key in ("format", "pattern", "minLength", "maxLength") if key in schema}
    form, written = bounds.get("format"), bounds.get("pattern")
    regex = _FORMATS.get(form) if isinstance(form, str) else None
    known = {"format"} if regex is not None else set()
    if regex is None and isinstance(written, str) and (regex := _whole(written)) is not None:
        known = {"pattern"}
    least, most = bounds.get("minLength", 0), bounds.get("maxLength")
    if regex is None and _is_count(least) and (most is None or _is_count(most)):
        known = {"minLength", "maxLength"}
    if tool.strict and (unknown := [key for key in bounds if key not in known]):
        path = f"{where}.{unknown[0]}"
        raise InvalidRequestError(f"{path}: {bounds[unknown[0]]!r} cannot be enforced in this model's format", path)
    if regex is not None:
        return f"/{regex}/"
    if not known or (not least and most is None):
        others = "".join(sorted({character for kind in kinds for character in BEGINNINGS.get(kind, "")}))
        return f'("" | /[^<{re.escape(others)}]/ RAW)' if others else "RAW"
    return f"/[^<]{{{least}}}/ RAW" if most is None else f"/[^<]{{{least},{most}}}/"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _whole(searched: str) -> str | None:
    """A regex that is searched for, as one that the whole text matches. None where it says too much to be sure that it
    can be written like that, and that the text behind the value is no part of what it matches.
    """
    begins, ends = searched.startswith("^"), searched.endswith("$") and not searched.endswith("\\$")
    inner = searched[int(begins) : len(searched) - int(ends)]
    plain = _KNOWN_ESCAPE.sub("_", inner)
    if re.search(r"[\\.<^$]|\(\?[^:]", plain):
        return None
    try:
        re.compile(inner)
        if any(re.match(each, "<") for each in re.findall(r"\[[^]]*\]", plain)):
            return None
    except (re.error, OverflowError, RecursionError):
        return None
    while (flat := _GROUP.sub("_", plain)) != plain:
        plain = flat
    if "|" in plain and (begins or ends):
        return None
    inner = re.sub(r"\\[dw]", lambda found: _CLASSES[found[0]], inner)
    inner = re.sub(r"(?<!\\)/", r"\\/", inner)
    return f"{'' if begins else '[^<]*'}({inner}){'' if ends else '[^<]*'}"

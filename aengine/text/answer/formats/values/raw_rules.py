"""Grammar rules of values as Qwen3-Coder writes them: strings without quotes, other values as JSON."""

from __future__ import annotations

import json
import re

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.base import CallableTool, Schema
from aengine.text.answer.formats.values.raw_text import BEGINNINGS, WORD_KINDS, as_json
from aengine.text.answer.formats.values.schemas import ANNOTATIONS, Kind, alternatives, kinds_of
from aengine.text.answer.lark import avoiding, json_value, literal, place, sequence

_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
# Days of the calendar: any day of a year but 0000, and February 29 of a leap year.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEARS = "(0[48]|[2468][048]|[13579][26])"
_DATE = f"({_YEAR}-{_DAY}|([0-9]{{2}}{_LEAP_YEARS}|{_LEAP_YEARS}00)-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT = "[0-9]{1,9}"
_DURATION_TIME = f"T({_COUNT}H({_COUNT}M({_COUNT}S)?)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HEX_GROUP = "[0-9a-f]{1,4}"

RAW_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_COUNT}W|{_COUNT}D({_DURATION_TIME})?|{_DURATION_TIME})",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_HEX_GROUP}:){{7}}{_HEX_GROUP}|({_HEX_GROUP}:){{1,6}}:{_HEX_GROUP}|::({_HEX_GROUP})?",
    "uri": r"[a-z][a-z0-9+.-]*:\/\/([a-zA-Z0-9._~:\/?#@!$&'()*+,;=-]|%[0-9A-F]{2})+",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}


_STRING_KEYWORDS = {"type", "format", "pattern", "minLength", "maxLength", "$defs", "definitions"}
_LONGEST_PATTERN = 1000
_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}  # with the meaning of JSON schemas
_KNOWN_ESCAPE = re.compile(r"\\[dw.+*?()\[\]{}|/^$-]")
_GROUP = re.compile(r"\[[^]]*\]|\((\?:)?[^()]*\)")


def raw_value_rules(rule: str, schema: Schema, stop: str, end: str, tool: CallableTool, where: str) -> list[str]:
    """Return rules in which `rule` describes a value followed by `end`.

    stop: the beginning of `end`, which no value contains. where: the schema's place in the request.
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
            case _ if (written := _enum_texts(each, stop, kinds)) is not None:
                options += [literal(text + end) for text in written]
            case None:
                if tool.strict and not schema.keys() <= ANNOTATIONS:
                    raise InvalidRequestError(f"{where}: it cannot be enforced in this model's format of calls", where)
                return [f"{rule}: {texts}", f"{texts}: RAW {literal(end)}", raw]
            case "string":
                options.append(name.upper())
                text = _text(each, kinds, tool, where)
                rules.append(f"{name.upper()}: {sequence(text, literal(end))}{place(where)}")
            case "boolean" | "null" as kind:
                options += [literal(word + end) for word, meant in WORD_KINDS.items() if meant == kind]
            case _:
                options.append(f"{name} {literal(end)}")
                rules.append(f"{name}: {json_value(each, where, lenient=not tool.strict)}")
    if not options:
        raise InvalidRequestError(f"{where}: none of its values can be written in this model's format of calls", where)
    return [f"{rule}: {' | '.join(options)}", *rules, raw]


def _enum_texts(schema: Schema, stop: str, kinds: frozenset[Kind]) -> list[str] | None:
    """Return the texts of the listed values; None if none are listed.

    Values that would be read as something else are left out.
    """
    values = schema.get("enum")
    if not isinstance(values, list):
        return None
    texts = [(value if isinstance(value, str) else json.dumps(value), value) for value in values]
    return [text for text, value in texts if stop not in text and json.loads(as_json(text, kinds)) == value]


def raw_text(schema: Schema, tool: CallableTool, where: str) -> str:
    """Return the terminal of a string that matches the schema, if only strings are written without quotes."""
    return _text(schema, frozenset({"string"}), tool, where)


def _text(schema: Schema, kinds: frozenset[Kind], tool: CallableTool, where: str) -> str:
    """Return the terminal of a string that matches the schema and does not begin like a value of the other kinds.

    If the tool is not strict, one of several bounds is enough: a grammar may have only a few intersections.
    """
    form, written = schema.get("format"), schema.get("pattern")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    bounds: dict[str, str | None] = {}
    if form is not None:
        bounds["format"] = RAW_FORMATS.get(form) if isinstance(form, str) else None
    if written is not None:
        bounds["pattern"] = _full_match(written) if isinstance(written, str) else None
    if most is not None or least:
        counts = _is_count(least) and (most is None or _is_count(most))
        bounds["maxLength" if least == 0 else "minLength"] = (
            f"[^<]{{{least},{'' if most is None else most}}}" if counts else None
        )
    regexes = [f"/{regex}/" for regex in bounds.values() if regex is not None]
    further = schema.keys() - ANNOTATIONS - _STRING_KEYWORDS
    if tool.strict and (unknown := [*(key for key, regex in bounds.items() if regex is None), *further]):
        key = unknown[0]
        path = f"{where}.{key}"
        raise InvalidRequestError(
            f"{path}: {schema[key]!r:.100} cannot be enforced in this model's format of calls", path
        )
    if regexes:
        return f"({' & '.join(regexes)})" if tool.strict else regexes[0]
    others = "".join(sorted({character for kind in kinds for character in BEGINNINGS.get(kind, "")}))
    return f'("" | /[^<{re.escape(others)}]/ RAW)' if others else "RAW"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _full_match(searched: str) -> str | None:
    """Turn a regex that is searched for into one that the whole text matches.

    Returns None unless it is certain that the regex can be rewritten, and that it cannot match the text after the
    value.
    """
    begins, ends = searched.startswith("^"), searched.endswith("$") and not searched.endswith("\\$")
    inner = searched[int(begins) : len(searched) - int(ends)]
    plain = _KNOWN_ESCAPE.sub("_", inner)
    if len(searched) > _LONGEST_PATTERN or re.search(r"[\\.<^$]|\(\?[^:]", plain):
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

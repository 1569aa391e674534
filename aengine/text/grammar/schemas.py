"""Rewrites JSON schemas for the grammar compiler: formats, pydantic's decimal numbers, and the digits of numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from aengine.errors import InvalidRequestError
from aengine.text.answer.formats.values.raw_rules import RAW_FORMATS

_COMPILED = frozenset(
    {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
_ANY_TEXT = frozenset({"path", "file-path", "directory-path", "binary", "password"})  # they constrain no character
_BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_EITHER = {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]}

# Formats, and the keywords that replace them for the compiler. These may allow only some of a format's values: for a
# network, a single address.
_REPLACED_FORMATS: dict[str, dict[str, Any]] = {
    # The compiler knows these, but allows February 30 and the year 0, which date parsers refuse.
    **{form: {"pattern": f"^({RAW_FORMATS[form]})$"} for form in ("date", "time", "date-time")},
    **{f"ipv4{kind}": {"format": "ipv4"} for kind in ("network", "interface")},
    **{f"ipv6{kind}": {"format": "ipv6"} for kind in ("network", "interface")},
    **{f"ipvany{kind}": _EITHER for kind in ("address", "network", "interface")},
    "base64": {"pattern": _BASE64},
    "base64url": {"pattern": _BASE64.replace("+/", "_-")},
    "byte": {"pattern": _BASE64},
    **{
        f"uuid{version}": {
            "pattern": rf"^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
        }
        for version in range(1, 9)
    },
}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # names to schemas
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_DEEPEST = 100  # deeper schemas are refused elsewhere

_DECIMAL = "^(?!^[-+.]*$)[+-]?0*"  # pydantic's patterns of decimal numbers begin so: more than signs and points
_PLACES = re.compile(r"\\d\{0,(\d+)\}\\\.\\d\{0,(\d+)\}")  # digits before and after the point
_DIGITS = re.compile(r"\[\\d\.\]\{1,(\d+)\}")  # the point counts as one of them
_AFTER_POINT = re.compile(r"\\\.\?\\d\{0,(\d+)\}")
_MOST_BEFORE, _MOST_AFTER = 19, 9  # digits, if the pattern sets no bound


def compilable_schema(schema: Mapping[str, Any], where: str, *, strict: bool) -> dict[str, Any]:
    """Return the schema in keywords that the compiler knows. It allows no more values than before.

    An unknown format and uniqueItems are dropped. If `strict`, they raise `InvalidRequestError`, which names the place
    below `where`.
    """
    return _SchemaRewriter(strict).rewrite(schema, where, 0)


class _SchemaRewriter:
    def __init__(self, strict: bool) -> None:
        self._strict = strict

    def rewrite(self, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        made = dict(schema)
        if depth > _DEEPEST:
            return made
        for key, value in schema.items():
            path = f"{where}.{key}"
            if key in _MAPS and isinstance(value, dict):
                made[key] = {name: self._below(each, f"{path}.{name}", depth) for name, each in value.items()}
            elif key in _LISTS and isinstance(value, list):
                made[key] = [self._below(each, f"{path}[{index}]", depth) for index, each in enumerate(value)]
            elif key in _SINGLE:
                made[key] = self._below(value, path, depth)
        if isinstance(made.get("uniqueItems"), bool) and (not made["uniqueItems"] or not self._strict):
            del made["uniqueItems"]
        if made.get("uniqueItems") is True:
            self._refuse(f"{where}.uniqueItems", "unique items cannot be enforced")
        if isinstance(form := made.get("format"), str) and (form not in _COMPILED or form in _REPLACED_FORMATS):
            self._rewrite_format(made, form, where)
        if isinstance(written := made.get("pattern"), str) and written.startswith(_DECIMAL):
            made["pattern"] = decimal_pattern(written)
        return made

    def _rewrite_format(self, made: dict[str, Any], form: str, where: str) -> None:
        otherwise = _REPLACED_FORMATS.get(form)
        if otherwise is not None and made.keys().isdisjoint(otherwise.keys() - {"format"}):
            del made["format"]
            made.update(otherwise)
        elif form in _COMPILED:
            return
        elif form in _ANY_TEXT or not self._strict:
            del made["format"]
        else:
            self._refuse(f"{where}.format", f"{form!r} is not known")

    def _below(self, value: object, where: str, depth: int) -> object:
        return self.rewrite(value, where, depth + 1) if isinstance(value, dict) else value

    def _refuse(self, path: str, reason: str) -> None:
        raise InvalidRequestError(f"{path}: {reason}; leave it out, or leave out strict", path)


def decimal_pattern(written: str) -> str:
    """Return a pattern of decimal numbers with pydantic's meaning, without its look-ahead."""
    most = None
    if (places := _PLACES.search(written)) is not None:
        before, after = int(places[1]), int(places[2])
    elif (digits := _DIGITS.search(written)) is not None:
        most = int(digits[1]) - 1
        before, after = min(most, _MOST_BEFORE), 0
    else:
        found = _AFTER_POINT.search(written)
        before, after = _MOST_BEFORE, _MOST_AFTER if found is None else int(found[1])
    forms = [rf"\d{{1,{before}}}"] * bool(before)
    if most is not None:  # the digits may be split in any way
        forms += [rf"\d{{{count}}}\.\d{{1,{most - count}}}" for count in range(min(most, _MOST_BEFORE))]
    elif after:
        forms += [rf"\d{{0,{before}}}\.\d{{1,{after}}}"]
    return f"^[+-]?0?({'|'.join(forms) or '0'})$"


LARGEST = 10**18
FINEST = 1e-9

_INDEPENDENT_LISTS = ("anyOf", "prefixItems")  # lists of schemas that constrain a value independently
_COMBINING = ("$ref", "allOf", "oneOf", "not", "enum", "const")


def bounded_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with numbers of at most 19 digits before the point and 9 after it, unless it sets other bounds.

    Without a bound, a model that begins to repeat a digit would never end the number. The result allows some of the
    values that the schema allows. If several schemas constrain one value (allOf, oneOf, not, $ref with other keywords),
    they stay as they are: after a change they could contradict one another.
    """
    made = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: _below(below) for name, below in value.items()}
        elif key in _INDEPENDENT_LISTS and isinstance(value, list):
            made[key] = [_below(below) for below in value]
        elif key in _SINGLE:
            made[key] = _below(value)
    types = made.get("type")
    types = types if isinstance(types, list) else [types]
    if ("number" in types or "integer" in types) and made.keys().isdisjoint(_COMBINING):
        lower, upper = _limits(made, "inimum"), _limits(made, "aximum")
        if not lower and all(limit > -LARGEST for limit in upper):
            made["minimum"] = -LARGEST
        if not upper and all(limit < LARGEST for limit in lower):
            made["maximum"] = LARGEST
        if "number" in types and all(round(limit, 6) == limit for limit in (*lower, *upper)):
            made.setdefault("multipleOf", FINEST)
    return made


def _below(value: object) -> object:
    return bounded_numbers(value) if isinstance(value, dict) else value


def _limits(schema: dict[str, Any], ending: str) -> list[float]:
    """Return the bounds whose keywords end with `ending`. The compiler refuses bounds that are not numbers."""
    values = [value for key, value in schema.items() if key.endswith(ending)]
    return [value if isinstance(value, (int, float)) else 0.0 for value in values]

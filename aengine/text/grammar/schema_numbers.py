"""Bounds the digits of numbers in JSON schemas: a model that begins to repeat a digit would never end one without a
bound.
"""

from __future__ import annotations

from typing import Any

LARGEST = 10**18
FINEST = 1e-9

_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # names to schemas
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_MEETING = ("$ref", "allOf", "oneOf", "not", "enum", "const")


def bounded_numbers(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with numbers of at most 19 digits before the point and 9 behind it, unless it says otherwise.

    Allows a part of what the schema allows. Where keywords of several schemas meet (allOf, oneOf, not, $ref beside
    others) it stays as it is: a narrower part could contradict another one.
    """
    made = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: _below(below) for name, below in value.items()}
        elif key in _LISTS and isinstance(value, list):
            made[key] = [_below(below) for below in value]
        elif key in _SINGLE:
            made[key] = _below(value)
    types = made.get("type")
    types = types if isinstance(types, list) else [types]
    if ("number" in types or "integer" in types) and made.keys().isdisjoint(_MEETING):
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
    """The schema's bounds on one side; anything but a number is the compiler's to refuse."""
    values = [value for key, value in schema.items() if key.endswith(ending)]
    return [value if isinstance(value, (int, float)) else 0.0 for value in values]

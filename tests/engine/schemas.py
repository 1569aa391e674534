"""Bounded JSON schemas, generated: every document that one allows is small."""

from __future__ import annotations

import random
from typing import Any

WORDS = ("name", "age", "city", "total", "héllo wörld", 'quo"ted', "tab\t", "a/b", "", "日本", "x" * 20)


def schema(seed: int) -> dict[str, Any]:
    """Return the schema of that number, nested three levels at most."""
    rng = random.Random(seed)
    made = _object(rng, 3) if rng.random() < 0.6 else _any(rng, 3)
    if rng.random() < 0.15:  # as a reference
        return {"$ref": "#/$defs/it", "$defs": {"it": made}}
    return made


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _enum, _const, _boolean, _null, _date, _pattern]
    if depth and rng.random() < 0.5:
        return rng.choice([_object, _array, _tuple, _any_of])(rng, depth - 1)
    return rng.choice(leaves)(rng)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(rng, depth) for name in names}}
    made["required"] = [name for name in names if rng.random() < 0.7]
    made["additionalProperties"] = False
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(rng, depth) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: random.Random) -> dict[str, Any]:
    least = rng.choice([0, 0, 1, 3])
    return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 12)}


def _integer(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "integer"}
    least = rng.randint(-1000, 1000)
    made: dict[str, Any] = {"type": "integer", "minimum": least, "maximum": least + rng.randint(10, 5000)}
    if rng.random() < 0.2:
        made["multipleOf"] = rng.choice([2, 3, 5, 10])
    return made


def _number(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": ["number", "null"]}
    least = rng.randint(-50, 50)
    return {"type": "number", rng.choice(["minimum", "exclusiveMinimum"]): least, "maximum": least + 10.5}


def _enum(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample([*WORDS, 1, -2.5, True, None, [1, "x"], {"k": []}], rng.randint(1, 5))}


def _const(rng: random.Random) -> dict[str, Any]:
    return {"const": rng.choice([*WORDS, 0, False, None, {"a": [1, 2]}])}


def _boolean(rng: random.Random) -> dict[str, Any]:
    return {"type": rng.choice(["boolean", ["boolean", "null"]])}


def _null(rng: random.Random) -> dict[str, Any]:
    return {"type": "null"}


def _date(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}


def _pattern(rng: random.Random) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(["^[a-c]{2,5}$", "^(foo|bar)-[0-9]{1,3}$", "^\\d{4}$", "^é?$"])}

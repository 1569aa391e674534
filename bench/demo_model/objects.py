"""Requests for JSON objects and arrays, and the JSON that answers them.

One object in ten is held out by a hash of its JSON. Held-out problems may also be made of held-out values, or
have a form of request that training never shows.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from random import Random

from bench.demo_model import people, pools
from bench.demo_model.pools import TRAINED, Pool

Maker = Callable[[Random, Pool], object]


def _price(rng: Random, _: Pool) -> object:
    return rng.randrange(1, 100) + rng.choice((0.5, 0.25, 0.75, 0.99, 0.1))


def _tags(rng: Random, pool: Pool) -> object:
    return [pools.word(rng, pool) for _ in range(rng.randint(1, 3))]


def _numbers(rng: Random, _: Pool) -> object:
    return [rng.randrange(100) for _ in range(rng.randint(1, 4))]


def _integer(top: int) -> Maker:
    return lambda rng, pool: rng.randrange(top)


def _flag(rng: Random, _: Pool) -> object:
    return rng.random() < 0.5


def _place(rng: Random, pool: Pool) -> object:
    return {"city": pools.city(rng, pool), "zip": rng.randrange(1000, 10000)}


FIELDS: dict[str, Maker] = {
    "name": pools.name,
    "age": _integer(100),
    "city": pools.city,
    "color": pools.word,
    "title": lambda rng, pool: pools.phrase(rng, pool, 3),
    "year": lambda rng, _: rng.randrange(1900, 2100),
    "price": _price,
    "count": _integer(1000),
    "score": _integer(101),
    "id": _integer(10000),
    "active": _flag,
    "done": _flag,
    "tags": _tags,
    "numbers": _numbers,
    "hobby": pools.word,
    "friend": pools.name,
    "item": pools.word,
    "address": _place,
    "note": lambda rng, pool: None if rng.random() < 0.3 else pools.phrase(rng, pool, 3),
    "country": pools.city,
    "language": pools.word,
    "owner": pools.name,
}

_SIMPLE = (
    "Give me a JSON object with {fields}.",
    "Give me JSON with {fields}.",
    "Write a JSON object with {fields}.",
    "Return a JSON object with {fields}.",
    "Make a JSON object with {fields}.",
    "Create a JSON object with {fields}.",
    "I need a JSON object with {fields}.",
    "Please write JSON with {fields}.",
    "JSON with {fields}",
    "Answer with a JSON object: {fields}",
    "Turn this into JSON: {fields}",
    "Can you make a JSON object with {fields}?",
    "Return only JSON. The fields are {fields}.",
    "Write the following as JSON: {fields}",
    "Show me a JSON object with {fields}.",
    "Show me JSON with {fields}.",
    "Write {fields} as JSON.",
    "Write {fields} as a JSON object.",
    "Put {fields} into a JSON object.",
    "Put {fields} into JSON.",
    "I want {fields} as JSON.",
    "Could you put {fields} into JSON?",
    "Could you make a JSON object with {fields}?",
    "Can you write {fields} in JSON format?",
    "{fields} as JSON",
    "{fields} as a JSON object",
    "{fields} in JSON, please",
    "Encode {fields} in JSON.",
    "Make an object that has {fields}, in JSON.",
    "I need JSON that has {fields}.",
    "I want a JSON object that has {fields}.",
    "Return an object that has {fields}, as JSON.",
    "Please return {fields} as a JSON object.",
    "Let me see {fields} as JSON.",
    "Format {fields} as JSON.",
    "Here is the data: {fields}. Give me the JSON.",
    "The fields are {fields}. Show the object in JSON.",
    "A JSON object, please: {fields}",
    "Please give me JSON for {fields}.",
    "What is {fields} in JSON?",
    "How do I write {fields} in JSON?",
)
_SIMPLE_UNSEEN = (
    "Please give me a JSON object that has {fields}.",
    "Show me {fields} as a JSON object.",
    "Could you write {fields} in JSON?",
)


def _described(rng: Random, value: dict[str, object]) -> str:
    """The fields and values in words, in one of several styles (one style for the whole object)."""
    style = rng.randrange(6)
    pairs = []
    for key, item in value.items():
        quoted = json.dumps(item, ensure_ascii=False)
        bare = item if isinstance(item, str) else quoted
        pairs.append(
            (
                f"{key} {quoted}",
                f"{key}: {bare}",
                f"{key} = {quoted}",
                f"{key} {bare}",
                f'"{key}" set to {quoted}',
                f"the {key} {bare}",
            )[style]
        )
    if len(pairs) > 1 and rng.random() < 0.7:
        return ", ".join(pairs[:-1]) + " and " + pairs[-1]
    return ", ".join(pairs)


def _listed(value: dict[str, object]) -> str:
    return "\n".join(f"{key}: {v if isinstance(v, str) else json.dumps(v)}" for key, v in value.items())


def _object(rng: Random, pool: Pool) -> dict[str, object]:
    keys = rng.sample(list(FIELDS), rng.choice((1, 2, 2, 3, 3, 3, 4, 5)))
    value = {key: FIELDS[key](rng, pool) for key in keys}
    if not pool.held_out and rng.random() < 0.2:
        value[pools.made_up(rng)] = rng.choice((pools.word(rng, pool), rng.randrange(1000), True, [1, 2]))
    return value


def _is_held_out(value: object) -> bool:
    return zlib.crc32(json.dumps(value, ensure_ascii=False).encode()) % 10 == 0


def person(rng: Random, *, held_out: bool, pool: Pool = TRAINED, unseen_form: bool = False) -> tuple[str, str]:
    """A request for an object about a person, and that object."""
    while True:
        question, value = people.request(rng, pool, unseen_form=unseen_form)
        if _is_held_out(value) == held_out:
            return question, json.dumps(value, ensure_ascii=False)


def request(rng: Random, *, held_out: bool, pool: Pool = TRAINED, unseen_form: bool = False) -> tuple[str, str]:
    """A request and the JSON that answers it: an object, or now and then an array."""
    while True:
        value: object
        roll = 1.0 if unseen_form else rng.random()  # only the general forms have unseen ones
        if roll < 0.3:
            question, value = people.request(rng, pool)
        elif roll < 0.38:
            items = [pools.word(rng, pool) for _ in range(rng.randint(2, 5))]
            text = ", ".join(items)
            forms = ("Give me a JSON array of {}.", "Write these words as a JSON array: {}", "JSON list: {}")
            question, value = rng.choice(forms).format(text), items
        else:
            value = fields = _object(rng, pool)
            if roll < 0.46:
                question = "Write this as JSON.\n" + _listed(fields)
            else:
                question = rng.choice(_SIMPLE_UNSEEN if unseen_form else _SIMPLE).format(fields=_described(rng, fields))
        if _is_held_out(value) == held_out:
            return question, json.dumps(value, ensure_ascii=False)

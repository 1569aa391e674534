"""Requests for a JSON object about a person described in a sentence, as people write them.

Leads, names and attributes combine freely, so that the words before a value determine its key.
"""

from __future__ import annotations

from random import Random

from bench.demo_model import pools
from bench.demo_model.pools import Pool

_LEADS = (
    "Give me a JSON object for {}.",
    "Give me JSON for {}.",
    "Give me a JSON object describing {}.",
    "Give me the JSON of {}.",
    "Write a JSON object for {}.",
    "Write a JSON object about {}.",
    "Write JSON for {}.",
    "Write JSON about {}.",
    "Return a JSON object for {}.",
    "Return JSON for {}.",
    "Make a JSON object for {}.",
    "Make JSON for {}.",
    "Create a JSON object for {}.",
    "Create a JSON object that describes {}.",
    "Create JSON for {}.",
    "Generate a JSON object for {}.",
    "Generate JSON for {}.",
    "Produce JSON for {}.",
    "Please write a JSON object for {}.",
    "Please give me JSON for {}.",
    "Please make a JSON object for {}.",
    "I need a JSON object for {}.",
    "I need JSON for {}.",
    "I want a JSON object for {}.",
    "Show me a JSON object for {}.",
    "Show me {} as JSON.",
    "Show me {} as a JSON object.",
    "Describe {} in JSON.",
    "Describe {} as a JSON object.",
    "Write {} as JSON.",
    "Answer with a JSON object for {}.",
    "Output a JSON object for {}.",
    "Can you give me a JSON object for {}?",
    "Can you write a JSON object for {}?",
    "Can you make JSON for {}?",
    "Could you write JSON for {}?",
    "Could you give me a JSON object for {}?",
    "JSON for {}",
    "JSON object for {}",
    "A JSON object for {}, please.",
    "{} as JSON",
    "{} as a JSON object, please.",
    "{} in JSON",
)
_LEADS_UNSEEN = (
    "I would like a JSON object for {}.",
    "Please create JSON for {}.",
    "Can you show me a JSON object for {}?",
    "Please return a JSON object for {}.",
)
_BEINGS = """
a person|a user|a customer|a man|a woman|a friend|a student|a teacher|a child|a girl|a boy|an employee|a player|
somebody|someone|a member|a patient|a guest|a worker|my friend|my brother|my sister|my mother|my father|my boss|
our customer|a new user|a young man|an old woman|the user|the person|a dog|a cat|my dog|my cat|a character|a hero
"""
_BEING = tuple(being for part in _BEINGS.split("|") if (being := part.strip()))
_NAMED = (
    *("{being} named {name}", "{being} named {name}", "{being} called {name}", "{being} with the name {name}"),
    *(
        "{being} with name {name}",
        "{being} whose name is {name}",
        "{being} {name}",
        "{being}, {name}",
        "{being}: {name}",
    ),
    *("{being} who is called {name}", "{being} by the name of {name}", "{name}", "{name}", "{name}", "{name}"),
)
_ATTRIBUTES = {
    "age": (
        *("age {}", "aged {}", "{} years old", "with age {}", "with the age {}", "of age {}", "who is {}", "{}"),
        *("who is {} years old", "whose age is {}", "at the age of {}", "age: {}", "is {} years old"),
    ),
    "city": (
        *("from {}", "in {}", "living in {}", "who lives in {}", "with city {}", "with the city {}", "city {}"),
        *("who is from {}", "whose city is {}", "based in {}", "city: {}", "lives in {}", "of {}"),
    ),
    "job": (
        "with the job {}",
        "with job {}",
        "job {}",
        "who works as {}",
        "who works as a {}",
        "whose job is {}",
        "job: {}",
        "works as {}",
    ),
    "hobby": ("with the hobby {}", "with hobby {}", "hobby {}", "whose hobby is {}", "hobby: {}"),
    "email": ("with the email {}", "with email {}", "email {}", "whose email is {}", "email: {}"),
    "country": ("with the country {}", "with country {}", "country {}", "whose country is {}", "country: {}"),
    "color": ("with the color {}", "color {}", "whose color is {}", "color: {}"),
    "id": ("with id {}", "with the id {}", "id {}", "number {}", "whose id is {}", "id: {}"),
}
_TOLD = (
    "{} Write this as JSON.",
    "{} Give me this as JSON.",
    "{} Make a JSON object.",
    "{} Put this into JSON.",
    "{} As JSON, please.",
    "Make JSON out of this: {}",
    "Write this as a JSON object: {}",
    "Turn this into JSON: {}",
    "Extract JSON: {}",
    "Convert to JSON: {}",
)
_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age}.",
    "{name} is {age} and lives in {city}.",
    "{name}, {age}, lives in {city}.",
    "{name} from {city} is {age} years old.",
    "My name is {name}, I am {age} and I live in {city}.",
    "I am {name}, {age} years old, from {city}.",
)
_KEYED = (
    "Give me a JSON object with the keys {keys} for {values}.",
    "Write JSON with the keys {keys}: {values}",
    "Return JSON with {keys} for {values}.",
    "Give me JSON with the fields {keys} for {values}.",
    "Use the keys {keys} and write JSON for {values}.",
    "JSON with the keys {keys} for {values}",
)
_ORDER = {
    _SENTENCES[1]: ("name", "city", "age"),
    _SENTENCES[4]: ("name", "city", "age"),
}


def _value(key: str, rng: Random, pool: Pool) -> object:
    if key == "age":
        return rng.randrange(1, 100)
    if key == "id":
        return rng.randrange(1, 10000)
    if key in ("city", "country"):
        return pools.city(rng, pool)
    if key == "email":
        return f"{pools.name(rng, pool).lower()}@{pools.word(rng, pool).lower()}.{rng.choice(('com', 'org', 'net'))}"
    return pools.word(rng, pool)


def _name(rng: Random, pool: Pool) -> str:
    return pools.full_name(rng, pool) if rng.random() < 0.15 else pools.name(rng, pool)


def _casual(form: str, rng: Random) -> str:
    """A form as it is typed in a hurry: lower case, no full stop. Values are put in later and keep their case."""
    if rng.random() < 0.12:
        form = form if form.startswith("JSON") else form[:1].lower() + form[1:]
        form = form.replace("JSON", "json") if rng.random() < 0.6 else form
    return form.rstrip(".") if rng.random() < 0.15 else form


def _joined(parts: list[str], rng: Random) -> str:
    """`a, b and c` and its like; the first part is followed by a comma or by nothing."""
    text = parts[0]
    for i, part in enumerate(parts[1:], 1):
        last = i == len(parts) - 1
        text += rng.choice((", ", " and ", ", and ") if last and i > 1 else (", ", " ", ", ", " and ")) + part
    return text


def _described(rng: Random, value: dict[str, object], lead: str) -> str:
    """One of the leads around a name and its attributes."""
    named = rng.choice(_NAMED).format(being=rng.choice(_BEING), name=value["name"])
    parts = [rng.choice(_ATTRIBUTES[key]).format(item) for key, item in value.items() if key != "name"]
    return _casual(lead, rng).format(_joined([named, *parts], rng))


def request(rng: Random, pool: Pool, *, unseen_form: bool = False) -> tuple[str, dict[str, object]]:
    """A request and the object that answers it, with the keys in the order of the request."""
    value: dict[str, object] = {"name": _name(rng, pool)}
    roll = 0.0 if unseen_form else rng.random()
    if roll < 0.7:
        keys = rng.sample(list(_ATTRIBUTES), rng.choice((1, 2, 2, 3)))
        if rng.random() < 0.6:  # what people name mostly
            keys = rng.choice((["age"], ["age"], ["city"], ["age", "city"], ["city", "age"], []))
        value |= {key: _value(key, rng, pool) for key in keys}
        return _described(rng, value, rng.choice(_LEADS_UNSEEN if unseen_form else _LEADS)), value
    value |= {"age": _value("age", rng, pool), "city": _value("city", rng, pool)}
    if roll < 0.88:
        sentence = rng.choice(_SENTENCES)
        told = {key: value[key] for key in _ORDER.get(sentence, ("name", "age", "city"))}
        return _casual(rng.choice(_TOLD), rng).format(sentence.format(**told)), told
    keys = rng.sample(list(value), rng.choice((2, 2, 3)))
    told = {key: value[key] for key in keys}
    quote = rng.choice(("", "", '"', "'"))
    listed = _joined_list([f"{quote}{key}{quote}" for key in keys], rng)
    values = _joined_list([str(item) for item in told.values()], rng)
    return _casual(rng.choice(_KEYED), rng).format(keys=listed, values=values), told


def _joined_list(items: list[str], rng: Random) -> str:
    return ", ".join(items) if rng.random() < 0.5 else ", ".join(items[:-1]) + " and " + items[-1]

"""Tools, requests that call for them, and the calls.

A tool's name and its parameters' names vary, so the model has to read them from the list in front of it. One
call in ten is held out by a hash of its arguments. Held-out problems may also be made of held-out values, or have
a form of request that training never shows.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from random import Random

from bench.demo_model import pools
from bench.demo_model.arithmetic import is_held_out
from bench.demo_model.pools import Pool
from bench.demo_model.tool_kinds import KINDS, POOLED, Kind, Value


@dataclass(frozen=True, slots=True)
class Tool:
    """A kind with its names chosen."""

    kind: Kind
    name: str
    parameters: tuple[str, ...]
    spec: dict[str, object]


# Words around a request that belong to no argument.
_TAILS = (
    "now",
    "right now",
    "today",
    "at the moment",
    "please",
    "for me",
    "for me, please",
    "again",
    "at once",
    "on the web",
)


_LEADS = ("Hi! ", "Please: ", "Hello. ", "I have a wish. ", "One more thing. ", "Okay. ", "Thanks! And now: ")


# Optional arguments that no request mentions, so that no call has them.
_OPTIONAL: tuple[tuple[str, dict[str, object]], ...] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("style", {"type": "string", "enum": ["short", "long"]}),
    ("verbose", {"type": "boolean"}),
    ("limit", {"type": "integer"}),
    ("tags", {"type": "array", "items": {"type": "string"}}),
)


def make_tool(rng: Random, kind: Kind) -> Tool:
    """Choose the names, and write the specification as OpenAI's API takes it."""
    names: list[str] = []
    for parameter in kind.parameters:
        names.append(rng.choice([n for n in parameter.names if n not in names]))
    described = rng.random() < 0.3
    properties: dict[str, object] = {}
    for parameter, name in zip(kind.parameters, names):
        properties[name] = {"type": parameter.type} | ({"description": _describe(rng, name)} if described else {})
    optional = rng.random() < 0.15
    if optional:
        properties.update([rng.choice(_OPTIONAL)])
    schema: dict[str, object] = {"type": "object", "properties": properties}
    if optional or rng.random() < 0.7:
        schema["required"] = names
    if rng.random() < 0.1:
        schema["additionalProperties"] = False
    if rng.random() < 0.2:
        schema = dict(rng.sample(list(schema.items()), len(schema)))
    name = rng.choice(kind.names)
    function: dict[str, object] = {"name": name}
    roll = rng.random()
    if roll < 0.85:
        function["description"] = (
            kind.description if roll < 0.6 else _describe(rng, kind.description.rstrip(".").lower())
        )
    function["parameters"] = schema
    return Tool(kind, name, tuple(names), {"type": "function", "function": function})


def _describe(rng: Random, what: str) -> str:
    """Return a description. Its words have no effect on the answer."""
    word = pools.made_up(rng)
    form = rng.choice(
        ("The {0}.", "The {0}", "the {0} to use", "The {0}, e.g. {1}", "{0}: use it for {1}", "{0} in {1}")
    )
    return form.format(what, word)


def make_tools(rng: Random, wanted: Kind) -> tuple[Tool, list[Tool]]:
    """A tool of the wanted kind, and the list that holds it among up to three others."""
    others = rng.sample([kind for kind in KINDS if kind is not wanted], rng.choice((0, 0, 1, 1, 2, 3)))
    tool = make_tool(rng, wanted)
    tools = [tool, *(make_tool(rng, kind) for kind in others)]
    rng.shuffle(tools)
    return tool, tools


@dataclass(frozen=True, slots=True)
class Call:
    """A tool with its arguments."""

    tool: Tool
    values: tuple[Value, ...]

    @property
    def arguments(self) -> dict[str, Value]:
        return dict(zip(self.tool.parameters, self.values))

    @property
    def text(self) -> str:
        """The call as the model writes it."""
        body = json.dumps({"name": self.tool.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"

    def request(self, form: str) -> str:
        """Fill a form of request with the arguments."""
        return form.format(*(("on" if v else "off") if isinstance(v, bool) else v for v in self.values))


def trained_request(rng: Random, call: Call) -> str:
    """Ask for the call in one of the trained forms, now and then with some words more than it needs."""
    kind = call.tool.kind
    form = rng.choice(kind.requests)
    if form[-1] in ".?" and rng.random() < 0.4:
        longer = f"{form[:-1]} {rng.choice(_TAILS)}{form[-1]}"
        form = form if longer in kind.unseen else longer
    text = call.request(form)
    if rng.random() < 0.15:
        text = rng.choice(_LEADS) + text
    return text


def make_call(rng: Random, tool: Tool, pool: Pool, *, held_out: bool) -> Call:
    """Arguments from the pool, trained or held out.

    Values from the held-out pool are new in themselves. All other values are divided by a hash.
    """
    parameters = tool.kind.parameters
    new = pool.held_out and any(parameter.make in POOLED for parameter in parameters)
    while True:
        values = tuple(parameter.make(rng, pool) for parameter in parameters)
        key = json.dumps([tool.kind.names[0], *values]).encode()
        if (
            not held_out
            and isinstance(values[0], int)
            and isinstance(values[-1], int)
            and is_held_out(values[0], values[-1])
        ):
            continue  # "What is 12 + 30?" must not be shown to a tool either when its pair is held out
        if new or (zlib.crc32(key) % 10 == 0) == held_out:
            return Call(tool, values)

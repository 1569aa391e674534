"""Sampling parameters as text: the flags of `generate`, and `/set` of `chat`."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any, get_type_hints

import msgspec

from aengine.cli.errors import UsageError
from aengine.config.configure import flag
from aengine.requests.sampling_params import SamplingParams

_HELP = {
    "max_tokens": "most tokens of an answer; without it: until the context is full",
    "min_tokens": "fewest tokens of an answer",
    "temperature": "0 for the likeliest token, up to 2 for wild ones; without it: what the checkpoint recommends",
    "top_k": "draw among so many of the likeliest tokens; 0: among all",
    "top_p": "draw among the likeliest tokens that together have this probability",
    "min_p": "draw among tokens that have this share of the likeliest one's probability",
    "repetition_penalty": "above 1 against tokens that were there",
    "presence_penalty": "above 0 against tokens that were in the answer",
    "frequency_penalty": "above 0 against tokens by how often they were in the answer",
    "seed": "the same one gives the same draws",
    "stop": 'text that ends an answer; a list as JSON: \'["\\n", "END"]\'',
    "stop_token_ids": "ids that end an answer, as JSON: '[7, 8]'",
    "allowed_token_ids": "ids that alone are drawn, as JSON; the end among them, or there is none but max_tokens",
    "ignore_eos": "true: go on behind the end that the model sees",
    "logprobs": "log-probabilities of the tokens, and of so many likelier ones at each place",
    "n": "so many answers to each prompt",
    "structured": 'what answers must match, as JSON: \'{"regex": "yes|no"}\', or json, choice, grammar',
}
_TYPES = get_type_hints(SamplingParams)
NAMES = tuple(SamplingParams.__struct_fields__)


def parse_parameter(name: str, text: str) -> Any:
    """The parameter's value as `text` spells it. Raises `UsageError`, naming it.

    Text, numbers, true, false and none stand as they are; lists and objects are JSON.
    """
    if name not in _TYPES:
        raise UsageError(f"there is no parameter {name!r}; there are {', '.join(NAMES)}")
    value: Any = text.strip()
    try:
        if value[:1] in ("[", "{", '"'):
            value = msgspec.json.decode(value)
        elif value.lower() == "none":
            value = None
        if name == "stop":
            return (value,) if isinstance(value, str) else tuple(msgspec.convert(value or (), list[str]))
        if name == "structured":
            return msgspec.convert(value, dict[str, Any] | None)
        return msgspec.convert(value, _TYPES[name], strict=False)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{name}: {error}, got {text!r}") from None


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    group = parser.add_argument_group("sampling")
    for name, text in _HELP.items():
        if name in without:
            continue
        group.add_argument(flag(name), dest=_dest(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)


def read_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that stand on the command line. Raises `UsageError`."""
    return {name: parse_parameter(name, getattr(args, _dest(name))) for name in _HELP if hasattr(args, _dest(name))}


def _dest(name: str) -> str:
    return f"sampling_{name}"  # the engine has a knob `seed` too

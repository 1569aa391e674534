"""Sampling parameters as text: the flags of `generate` and `chat`, and `/set` in the shell."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec

from aengine.cli.errors import UsageError
from aengine.config.configure import flag
from aengine.errors import InvalidRequestError
from aengine.requests.sampling_params import NAMES, PARAMETERS, SamplingParams, check_number, unknown_parameter

_TYPES = get_type_hints(SamplingParams)
_METAVARS: dict[type, str] = {int: "N", float: "X", bool: "true|false"}


def parse_parameter(name: str, text: str) -> Any:
    """Return a parameter's value from its text. Raises `UsageError`, which names the parameter.

    Text, numbers, true, false and none are written without quotes. Lists and objects are JSON.
    """
    if name not in PARAMETERS:
        raise UsageError(str(unknown_parameter(name)))
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
        value = msgspec.convert(value, _TYPES[name], strict=False)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            check_number(name, value)
        return value
    except msgspec.MsgspecError as error:
        wanted = re.sub(r", got `\w+`$", "", str(error))
        raise UsageError(f"{name}: {wanted}, got {text!r}") from None
    except InvalidRequestError as error:
        raise UsageError(str(error)) from None


def add_sampling(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add a flag for each parameter that is not in `without`."""
    group = parser.add_argument_group("sampling")
    for name in NAMES:
        if name not in without:
            text = PARAMETERS[name].help.replace("%", "%%")
            group.add_argument(
                flag(name), dest=_dest(name), default=argparse.SUPPRESS, metavar=_metavar(name), help=text
            )


def read_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given on the command line. Raises `UsageError`."""
    return {name: parse_parameter(name, getattr(args, _dest(name))) for name in NAMES if hasattr(args, _dest(name))}


def _metavar(name: str) -> str:
    """Return the placeholder of the parameter's value in the help."""
    kind = _TYPES[name]
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return next((shown for known, shown in _METAVARS.items() if known in kinds), "JSON")


def _dest(name: str) -> str:
    return f"sampling_{name}"  # the engine has a knob `seed` too

"""Builds configs from `AENGINE_*` variables and arguments, and refuses what cannot be used, naming the knob."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec

from aengine.config import EngineConfig, ServerConfig
from aengine.errors import ConfigError

_LISTS = {
    "allowed_hosts",
    "allowed_origins",
    "api_keys",
    "lora_folders",
    "reload_folders",
}  # as text: separated by commas
_MAPS = {"lora"}  # as text: name=value, separated by commas
_SECRETS = {"api_keys"}

T = TypeVar("T", bound=msgspec.Struct)


def configure(kind: type[T], environ: Mapping[str, str] | None = None, **knobs: Any) -> T:
    """Build a config from `AENGINE_*` variables and from arguments, which win.

    Raises `ConfigError` that names the knob: one that is unknown, malformed, or out of its range.
    """
    environ = os.environ if environ is None else environ
    names = {field.name for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name in names:
        if (text := environ.get(f"AENGINE_{name.upper()}", "")) != "":
            values[name] = text
    for name, value in knobs.items():
        if name not in names:
            raise ConfigError(f"unknown knob {name!r}; known knobs are {', '.join(sorted(names))}")
        values[name] = value
    for name in _LISTS & values.keys():
        if isinstance(values[name], str):
            values[name] = _split(values[name])
            if name == "api_keys" and not values[name]:  # whoever sets it wants a locked door
                raise ConfigError("api_keys: AENGINE_API_KEYS is set but names no key; name one or unset it")
    for name in _MAPS & values.keys():
        if isinstance(values[name], str):
            values[name] = dict(_pair(name, part) for part in _split(values[name]))
    for field in msgspec.structs.fields(kind):
        if isinstance(given := values.get(field.name), str) and _takes_float(field.type):
            values[field.name] = re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", given)  # .5 is no number of msgspec's
    try:
        # Text comes from the environment: not strict, so "4096" is an int and "false" is a bool.
        config = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        knob = path.rstrip("`").removesuffix("[...]") or "?"
        if message.startswith("Invalid enum value"):
            message = f"must be one of {', '.join(map(str, _choices(kind, knob)))}"
        raise _refused(knob, message, values) from None
    for name in names:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise _refused(name, "Expected a finite number", values)
    return config


def check_names(engine: EngineConfig, server: ServerConfig) -> None:
    """Check what both have to say about adapters. Raises `ConfigError`, naming the knob."""
    if server.served_model_name in engine.lora:
        raise ConfigError(f"lora: {server.served_model_name!r} is the model's own name (served_model_name)")
    if engine.lora_loading and not server.lora_folders and not server.lora_hub:
        raise ConfigError(
            "lora_loading: clients may load no adapter as long as neither lora_folders says below which folders nor "
            "lora_hub allows Hugging Face ids (--lora-folders or AENGINE_LORA_FOLDERS, --lora-hub or AENGINE_LORA_HUB)"
        )


def _takes_float(kind: object) -> bool:
    return kind is float or any(map(_takes_float, get_args(kind)))


def _choices(kind: type[msgspec.Struct], knob: str) -> tuple[object, ...]:
    """What a knob of fixed choices may be."""
    field = next(field for field in msgspec.structs.fields(kind) if field.name == knob)
    return get_args(get_args(field.type)[0])  # Annotated[Literal[...], Meta(...)]


def _refused(knob: str, message: str, values: Mapping[str, Any]) -> ConfigError:
    got = "" if knob in _SECRETS else f", got {values.get(knob)!r}"
    return ConfigError(f"{knob}: {message}{got} (argument {knob}=, {flag(knob)} or AENGINE_{knob.upper()})")


def _pair(knob: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ConfigError(
            f"{knob}: {text!r} is not name=value (argument {knob}=, {flag(knob)} or AENGINE_{knob.upper()})"
        )
    return name.strip(), value.strip()


def flag(knob: str) -> str:
    """The command line's spelling of a knob."""
    return f"--{knob.replace('_', '-')}"


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())

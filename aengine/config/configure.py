"""Builds configs from `AENGINE_*` variables and arguments. Errors name the knob."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar, get_args

import msgspec

from aengine.config import EngineConfig, ListenConfig, ReplicasConfig, ServerConfig
from aengine.config.other_names import nearest_knob, remedy
from aengine.config.speculation import Speculation
from aengine.errors import ConfigError
from aengine.sizes import parse_count

_KINDS = (EngineConfig, ServerConfig, ListenConfig, ReplicasConfig)  # a variable may belong to any of these
_LISTS = {
    "allowed_hosts",
    "allowed_origins",
    "api_keys",
    "image_url_hosts",
    "lora_folders",
    "reload_folders",
    "served_model_name",
}  # their text is separated by commas, or JSON
_MAPS = {"lora"}  # their text is name=value, separated by commas
_SECRETS = {"api_keys"}
_SYNONYMS = {  # vLLM's names of equal values, and what a switch would say
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto"},
    "quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        "compressed_tensors": "compressed-tensors",
        "modelopt_fp4": "modelopt",
        "auto_round": "auto-round",
        "fbgemm_fp8": "fbgemm-fp8",
    },
    "speculation": {"true": "auto", "false": "off", "none": "off"},
}
_CHECKS: Mapping[str, Callable[[str], object]] = {"speculation": Speculation.parse}  # they raise `ValueError`
_KEY_OF_CLIENTS = "AENGINE_API_KEY"  # `aengine chat --url` sends it; a server without api_keys accepts it
# Variables of Kubernetes and Docker for a service with the name aengine, or aengine-something.
_SERVICE_VARIABLE = re.compile(
    r"AENGINE_(\w+_)?(SERVICE_(HOST|PORT\w*)=.*|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?=.*|=(tcp|udp)://.*))"
)

T = TypeVar("T", bound=msgspec.Struct)


def in_python(knob: str) -> str:
    """Return how a Python program writes a knob."""
    return f"argument {knob}="


def flag(knob: str) -> str:
    """Return how the command line writes a knob."""
    return f"--{knob.replace('_', '-')}"


def variable(knob: str) -> str:
    """Return how the environment writes a knob."""
    return f"AENGINE_{knob.upper()}"


def configure(
    kind: type[T],
    environ: Mapping[str, str] | None = None,
    /,
    spelled: Callable[[str], str] = in_python,
    **knobs: Any,
) -> T:
    """Build a config from `AENGINE_*` variables and arguments. Arguments win.

    spelled: returns how an argument was written, for errors.

    Raises `ConfigError`, which names the knob and where it was set, if one is unknown, malformed or out of range.
    """
    environ = os.environ if environ is None else environ
    environ = {
        name: text
        for name, text in environ.items()
        if name.startswith("AENGINE_") and text and not _SERVICE_VARIABLE.fullmatch(f"{name}={text}")
    }
    _check_variables(environ)
    names = {field.name for field in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {name: environ[variable(name)] for name in names if variable(name) in environ}
    if "api_keys" in names and _KEY_OF_CLIENTS in environ:
        values.setdefault("api_keys", (environ[_KEY_OF_CLIENTS],))
    for name, value in knobs.items():
        if name not in names:
            raise ConfigError(unknown_knob(name, names))
        values[name] = value
    given = dict(values)

    def refused(knob: str, message: str) -> ConfigError:
        got = "" if knob in _SECRETS else f", got {given.get(knob)!r}"
        return ConfigError(f"{knob}: {message}{got} ({spelled(knob) if knob in knobs else variable(knob)})")

    for field in msgspec.structs.fields(kind):
        text = values.get(field.name)
        if isinstance(text, bool) and field.type is not bool and field.name in _SYNONYMS:
            text = str(text).lower()  # YAML reads `off` as false
        if isinstance(text, str):
            try:
                values[field.name] = _read(field.name, field.type, text)
            except ValueError as error:
                raise refused(field.name, str(error)) from None
    try:
        # Not strict, because the environment has text: "4096" is an int and "false" is a bool.
        config = msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        knob = path.rstrip("`").removesuffix("[...]") or "?"
        message = re.sub(r", got `\w+`$", "", message).replace(" | null`", "`")
        if message.startswith("Invalid enum value"):
            message = f"must be one of {', '.join(map(str, _choices(kind, knob)))}"
        raise refused(knob, message) from None
    for name in names:
        value = getattr(config, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise refused(name, "Expected a finite number")
    return config


def _read(name: str, kind: object, text: str) -> object:
    """Return the value of a text, or the text itself if msgspec can convert it. Raises `ValueError`."""
    if name in _LISTS:
        parts = _parts(text)
        if name == "api_keys" and not parts:  # a variable without a key must not leave the server open
            raise ValueError("it is set but names no key; name one or unset it")
        return parts
    if name in _MAPS:
        return dict(_pair(part) for part in _split(text))
    if _takes(float, kind):
        return re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text)  # msgspec does not read .5
    if _takes(int, kind) and (count := parse_count(text)) is not None:
        return count
    text = _SYNONYMS.get(name, {}).get(text, text)
    if name in _CHECKS:
        _CHECKS[name](text)
    return text


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for unknown `AENGINE_*` variables, with the nearest known ones."""
    known = [name for kind in _KINDS for name in kind.__struct_fields__]
    taken = {*map(variable, known), _KEY_OF_CLIENTS}
    found = [
        name + suggestion(name.removeprefix("AENGINE_").lower(), known, variable)
        for name in sorted(environ.keys() - taken)
    ]
    if found:
        noun, pronoun = ("variables", "them") if len(found) > 1 else ("variable", "it")
        raise ConfigError(f"unknown {noun} {', '.join(found)}; correct or unset {pronoun}")


def unknown_knob(name: str, names: Collection[str]) -> str:
    """Return the message about an unknown knob, with the one that was probably meant."""
    return f"unknown knob {name!r}{suggestion(name, names, str)}; known knobs are {', '.join(sorted(names))}"


def suggestion(name: str, known: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return what an unknown name probably means, in parentheses; empty if no known name is similar."""
    if advice := remedy(name):
        return f" ({advice})"
    if meant := nearest_knob(name, known):
        knob, off = meant
        return f" (did you mean {spelled(knob)}{'=false' if off else ''}?)"
    return ""


def check_names(engine: EngineConfig, server: ServerConfig) -> None:
    """Check the knobs about adapters, which are in both configs. Raises `ConfigError`, which names the knob."""
    for name in server.served_model_name:
        if name in engine.lora:
            raise ConfigError(f"lora: {name!r} is the model's own name (served_model_name)")
    if engine.lora_loading and not server.lora_folders and not server.lora_hub:
        raise ConfigError(
            "lora_loading: clients may load no adapter unless lora_folders names folders or lora_hub allows Hugging "
            "Face ids (--lora-folders or AENGINE_LORA_FOLDERS, --lora-hub or AENGINE_LORA_HUB)"
        )


def _takes(number: type, kind: object) -> bool:
    return kind is number or any(_takes(number, part) for part in get_args(kind))


def _choices(kind: type[msgspec.Struct], knob: str) -> tuple[object, ...]:
    """Return the choices of a knob."""
    field = next(field for field in msgspec.structs.fields(kind) if field.name == knob)
    return get_args(get_args(field.type)[0])  # Annotated[Literal[...], Meta(...)]


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.strip() and equals and value.strip()):
        raise ValueError("must be pairs of name=value, separated by commas")
    return name.strip(), value.strip()


def _parts(text: str) -> tuple[object, ...]:
    """Return the parts of a list, separated by commas, or as JSON as in vLLM's flags."""
    if text.lstrip().startswith("["):
        try:
            return tuple(msgspec.json.decode(text, type=list[object]))
        except msgspec.DecodeError:
            raise ValueError("begins like a JSON list but is not one") from None
    return _split(text)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())

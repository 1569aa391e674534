"""Flags for the knobs in `aengine.config`, which defines their names, types, defaults and help."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import msgspec

from aengine.cli.errors import UsageError
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import configure, flag, variable
from aengine.errors import ConfigError
from aengine.sizes import format_bytes

T = TypeVar("T", EngineConfig, ServerConfig, ListenConfig)


class Knob(NamedTuple):
    """One field of a config, as the command line needs it."""

    name: str
    kind: str  # the placeholder of the value in the help; empty for a switch
    choices: tuple[str, ...]
    default: Any
    help: str


def list_knobs(kind: type[T]) -> Iterator[Knob]:
    """Yield the knobs of a config in the order of their definition."""
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]  # a struct has fields
        layers = _layers(field.type)
        text = next(found for layer in layers if (found := _description(layer)))
        inner = next(layer for layer in reversed(layers) if not isinstance(layer, msgspec.inspect.NoneType))
        choices = tuple(map(str, inner.values)) if isinstance(inner, msgspec.inspect.LiteralType) else ()
        default = None if field.default is msgspec.NODEFAULT else field.default
        yield Knob(field.name, _KINDS.get(type(inner), "TEXT"), choices, default, text)


_KINDS: dict[type, str] = {
    msgspec.inspect.BoolType: "",
    msgspec.inspect.IntType: "N",
    msgspec.inspect.FloatType: "X",
    msgspec.inspect.VarTupleType: "A,B",
    msgspec.inspect.DictType: "A=X,B=Y",
}


def _layers(kind: Any) -> list[Any]:
    """Return a type, the type inside its annotations, and the members of its union, from the outside in."""
    layers = [kind]
    if isinstance(kind, msgspec.inspect.Metadata):
        layers += _layers(kind.type)
    elif isinstance(kind, msgspec.inspect.UnionType):
        for member in kind.types:
            layers += _layers(member)
    return layers


def _description(kind: Any) -> str:
    schema = getattr(kind, "extra_json_schema", None) or {}
    return str(schema.get("description", ""))


def add_knobs(parser: argparse.ArgumentParser, kind: type[T], title: str, skip: Collection[str] = ()) -> None:
    """Add a group of flags. A flag that is not given has no entry in the namespace; the environment then decides."""
    group = parser.add_argument_group(title)
    for knob in list_knobs(kind):
        if knob.name in skip:
            continue
        default = f"default: {shown}; " if (shown := shown_default(knob)) else ""
        text = f"{knob.help} ({default}{variable(knob.name)})".replace("%", "%%")
        if not knob.kind:
            group.add_argument(
                flag(knob.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            metavar = "|".join(knob.choices) or knob.kind
            # Pairs may be given one by one, each after its own flag.
            action: Any = "append" if knob.kind == _KINDS[msgspec.inspect.DictType] else "store"
            action = _OneModel if knob.name == "model" else action
            nargs = "+" if knob.name == "served_model_name" else None  # as in vLLM
            group.add_argument(
                flag(knob.name), default=argparse.SUPPRESS, metavar=metavar, help=text, action=action, nargs=nargs
            )


def shown_default(knob: Knob) -> str:
    """Return a knob's default as the help shows it; empty if there is none, or its description has it."""
    default = knob.default
    if isinstance(default, bool):
        return "on" if default else "off"
    if knob.name.endswith("_bytes"):
        return format_bytes(default)
    return "" if default in (None, (), "") else str(default)


def given_knobs(args: argparse.Namespace, kind: type[T]) -> dict[str, Any]:
    """Return the values of the knobs that were given on the command line."""
    given = {knob.name: getattr(args, knob.name) for knob in list_knobs(kind) if hasattr(args, knob.name)}
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}


def read_knobs(args: argparse.Namespace, kind: type[T], in_file: Mapping[str, Any] = MappingProxyType({})) -> T:
    """Return the config from the flags, a file, the environment and the defaults, in this order.

    Raises `UsageError`, which names the knob.
    """
    typed = given_knobs(args, kind)
    from_file = {name: value for name, value in in_file.items() if name in kind.__struct_fields__}

    def spelled(name: str) -> str:
        return flag(name) if name in typed else f"{args.config}: {flag(name)[2:]}"

    try:
        return configure(kind, None, spelled, **{**from_file, **typed})
    except ConfigError as error:
        raise UsageError(str(error)) from None


class _OneModel(argparse.Action):
    """Stores the model. Raises `UsageError` if two different ones are given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, "model", value)
        if before != value:
            raise UsageError(f"two models are named, {before!r} and {value!r}; leave one out")
        namespace.model = value


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        action=_OneModel,
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help="checkpoint folder or Hugging Face id; default: the small demo model in the package (AENGINE_MODEL)",
    )

"""The flags of `aengine serve`: the knobs, flags of vLLM's with the same meaning, and `--config FILE`.

A file is YAML, with the names that flags have on the command line.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

from aengine.cli.errors import UsageError
from aengine.cli.knobs import add_knobs, add_model, list_knobs, read_knobs
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import flag, suggestion
from aengine.config.other_names import OTHER_NAMES

_KNOBS = {name for kind in (EngineConfig, ServerConfig, ListenConfig) for name in kind.__struct_fields__}
_ACCEPTED = {name: other.knob for name, other in OTHER_NAMES.items() if other.is_accepted}  # empty: without effect


class FileFlags(NamedTuple):
    """The content of a file of flags."""

    knobs: dict[str, Any]
    without_effect: set[str]  # names that it sets to true, and that are accepted without effect


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag. The help does not show flags of other engines."""
    add_model(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; those on the command line win")
    add_knobs(parser, ListenConfig, "where to listen")
    add_knobs(parser, ServerConfig, "the API")
    add_knobs(parser, EngineConfig, "the engine")
    switches = {knob.name for knob in list_knobs(EngineConfig) if not knob.kind}
    for name, knob in _ACCEPTED.items():
        how: dict[str, Any] = {}
        if not knob:
            how["action"] = "store_true"
        elif knob == "api_keys":
            how["type"] = lambda key: (key,)  # one key, even if it has commas
        elif knob in switches:
            how["action"] = argparse.BooleanOptionalAction
        option = flag(name) if len(name) > 2 else f"-{name}"
        parser.add_argument(option, dest=knob or name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


def read_flags(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig, ListenConfig]:
    """Return the configs from the flags, the file, the environment and the defaults. Raises `UsageError`.

    Prints a note for an accepted flag of another engine that may be expected to do more.
    """
    file = FileFlags({}, set()) if args.config is None else read_file(args.config)
    engine = read_knobs(args, EngineConfig, file.knobs)
    server = read_knobs(args, ServerConfig, file.knobs)
    listen = read_knobs(args, ListenConfig, file.knobs)
    given = {name for name, knob in _ACCEPTED.items() if not knob and hasattr(args, name)} | file.without_effect
    if "trust_remote_code" in given:
        _print("trust-remote-code: code of a checkpoint is never run here; known families load without it")
    if "enable_lora" in given and not engine.lora and not engine.lora_loading:
        _print("enable-lora: no adapter is given; add --lora NAME=FOLDER")
    return engine, server, listen


def read_file(path: str) -> FileFlags:
    """Read a file of flags. Raises `UsageError` if it cannot be read, or with the names of all unknown flags."""
    import yaml

    try:
        data = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    file = FileFlags({}, set())
    if data is None:
        return file
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"--config {path}: expected flags and their values, such as `port: 9000`")
    unknown = []
    for key, value in data.items():
        name = key.replace("-", "_")
        knob = _ACCEPTED.get(name, name)
        if value is None:
            continue
        if knob in _KNOBS:
            file.knobs[knob] = [value] if name == "api_key" else _text(value)
        elif not knob and isinstance(value, bool):
            if value:
                file.without_effect.add(name)
        else:
            unknown.append(key + suggestion(name, _KNOBS, lambda known: known.replace("_", "-")))
    if unknown:
        raise UsageError(f"--config {path}: unknown {', '.join(unknown)}")
    return file


def _text(value: Any) -> Any:
    """Turn numbers into text, so that `configure` reads them like a flag."""
    if isinstance(value, dict):
        return {str(name): str(part) for name, part in value.items()}
    if isinstance(value, list):
        return [str(part) for part in value]
    return value if isinstance(value, bool) else str(value)


def _print(text: str) -> None:
    print(f"aengine: {text}", file=sys.stderr, flush=True)

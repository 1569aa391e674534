"""`--config FILE`: flags as a YAML file, with the names that they have on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aengine.cli.errors import UsageError
from aengine.cli.foreign_flags import ALWAYS, SAME_KNOB
from aengine.config import EngineConfig, ListenConfig, ServerConfig
from aengine.config.configure import instead_of

_KNOBS = {name for kind in (EngineConfig, ServerConfig, ListenConfig) for name in kind.__struct_fields__}


def read_config_file(path: str) -> tuple[dict[str, Any], set[str]]:
    """The knobs that a file sets, and what it asks for that is so in any case.

    Raises `UsageError` if it cannot be read or sets something that there is not, naming all of it.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}, set()
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise UsageError(f"--config {path}: expected flags and their values, such as `port: 9000`")
    knobs: dict[str, Any] = {}
    always: set[str] = set()
    unknown = []
    for key, value in data.items():
        name = key.replace("-", "_")
        knob = SAME_KNOB.get(name, name)
        if value is None:
            continue
        if knob in _KNOBS:
            knobs[knob] = [value] if name == "api_key" else _text(value)
        elif name in ALWAYS and value is True:
            always.add(name)
        elif not (name in ALWAYS and value is False):
            unknown.append(key + instead_of(name, _KNOBS, lambda known: known.replace("_", "-")))
    if unknown:
        raise UsageError(f"--config {path}: unknown {', '.join(unknown)}")
    return knobs, always


def _text(value: Any) -> Any:
    """A number as text, so that it is read as the same text on the command line is."""
    if isinstance(value, dict):
        return {str(name): str(part) for name, part in value.items()}
    if isinstance(value, list):
        return [str(part) for part in value]
    return value if isinstance(value, bool) else str(value)

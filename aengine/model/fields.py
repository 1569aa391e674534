"""Reads a checkpoint's JSON files and checks every value."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from aengine.errors import CheckpointError

_MAX_VOCAB = 2**21  # eight times the largest known vocabulary; start-up spends 2 us per id on grammars
MAX_JSON_BYTES = 16 * 2**20  # the largest known index has 9 MiB; the parsed object takes 20 times as much memory


def read_json_object(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. Raises `CheckpointError`, naming the file, if there is none."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return cast("dict[str, object]", value)


def read_json(path: Path) -> object:
    """Return the value in a JSON file. Raises `CheckpointError`, naming the file, if it cannot be read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            raise CheckpointError(f"{path}: is no regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB, which no such file is")
        return json.loads(path.read_bytes())  # accepts Infinity and NaN, which Python's json writes
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name} in this folder") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None


class Fields:
    """Typed, range-checked access to a JSON object. Every error is a `CheckpointError` that names file and key.

    An absent key and a null value mean the same: the default, or an error if there is no default.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self.source = source

    def fail(self, key: str, why: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {printable(key)} {why}")

    def has_key(self, key: str) -> bool:
        """Return whether the object has the key, even with the value null."""
        return key in self._values

    def present(self, key: str) -> bool:
        return self._values.get(key) is not None

    def is_text(self, key: str) -> bool:
        return isinstance(self._values.get(key), str)

    def is_integer(self, key: str) -> bool:
        return type(self._values.get(key)) is int

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """Return these fields with `defaults` for missing keys."""
        return Fields({**defaults, **self._values}, self.source)

    def without(self, key: str) -> Fields:
        """Return these fields without a key."""
        return Fields({name: value for name, value in self._values.items() if name != key}, self.source)

    def items(self) -> Iterable[tuple[str, object]]:
        return self._values.items()

    def names(self) -> tuple[str, ...]:
        return tuple(self._values)

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model has embeddings for."""
        return self.integer("vocab_size", 1, _MAX_VOCAB)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"must be an integer from {low} to {high}, is {shown(value)}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """Return a finite number in [low, high]."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.fail(key, f"must be a number from {low:g} to {high:g}, is {shown(value)}")
        number = float(value)
        if not math.isfinite(number):
            raise self.fail(key, f"must be finite, is {number}")
        return number

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """Return a list of `count` finite numbers in [low, high]."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.fail(key, f"must be a list of {count} numbers, is {shown(value)}")
        return tuple(Fields({key: item}, self.source).number(key, low, high) for item in value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, is {shown(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, is {shown(value)}")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(key, f"must be a list of strings, is {shown(value)}")
        return cast("list[str]", value)

    def lists_of_strings(self, key: str) -> list[list[str]]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self.fail(key, f"must be a list of lists of strings, is {shown(value)}")
        return [Fields({key: item}, self.source).strings(key) for item in value]

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """Return a list of `count` integers in [low, high]."""
        value = self._value(key, None)
        items = value if isinstance(value, list) else []
        if len(items) != count or not all(type(item) is int and low <= item <= high for item in items):
            raise self.fail(key, f"must be a list of {count} integers from {low} to {high}, is {shown(value)}")
        return tuple(items)

    def list_of_integers(self, key: str) -> list[int]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, int) and item is not True for item in value):
            raise self.fail(key, f"must be a list of integers, is {shown(value)}")
        return cast("list[int]", value)

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Return the token ids of a key that may hold one id, a list, or null."""
        value = self._values.get(key)
        ids = () if value is None else tuple(value) if isinstance(value, list) else (value,)
        for item in ids:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
                raise self.fail(key, f"must hold token ids from 0 to {vocab_size - 1}, holds {shown(item)}")
        return cast("tuple[int, ...]", ids)

    def section(self, key: str) -> Fields | None:
        """Return a nested object, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"must be an object, is {shown(value)}")
        return Fields(cast("dict[str, object]", value), f"{self.source}: {printable(key)}")

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value


def printable(name: str) -> str:
    """Return a name from a file for a message, cut to 200 characters. Control characters are escaped."""
    return name[:200] if name.isprintable() else repr(name[:200])


def shown(value: object) -> str:
    """Return a value for a message, cut after 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."

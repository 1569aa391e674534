"""Reads the names of modules in an adapter's settings.

PEFT also accepts regular expressions. This engine runs none, because an untrusted file could block the process by
backtracking. The file's tensors show which modules it changes. If an alpha depends on an expression, the adapter is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from aengine.errors import AdapterError
from aengine.model.fields import Fields

T = TypeVar("T", int, float)

MAX_NAMES = 65536  # in a list: more than a model has modules
_ALL_LINEAR = "all-linear"
_LAYER = re.compile(r"(?:^|\.)(\w+)\.(\d+)\.")
# A name, possibly with escaped dots, ^ and $. PEFT writes `.*\.` in front of the names of fused experts.
_NAME = re.compile(r"(?:\.\*\\\.(?!\^))?(\^?(?:[\w\-]|\\?\.)+)\$?", re.ASCII)
_LONGEST = 1000


def is_named(module: str, names: Collection[str]) -> bool:
    """Return whether one of the names is the module's name, or a part of it that follows a dot up to the end."""
    return any(end in names for end in _ends(module))


def _ends(module: str) -> Iterator[str]:
    """Yield the name, and the part after each of its dots."""
    parts = module.split(".")
    return (".".join(parts[at:]) for at in range(len(parts)))


@dataclass(frozen=True, slots=True)
class Patterns(Generic[T]):
    """A number for each of some modules, such as its rank."""

    values: Mapping[
        str, T
    ]  # by name or end of a name; as in PEFT, the first match counts. ^: the whole name must match.
    readable: bool = True  # False: a key is a regular expression

    @classmethod
    def read(cls, fields: Fields, key: str, number: Callable[[Fields, str], T]) -> Patterns[T]:
        section = fields.section(key)
        if section is None:
            return cls({})
        values: dict[str, T] = {}
        for pattern in section.names():
            value, name = number(section, pattern), _NAME.fullmatch(pattern[:_LONGEST])
            if name is None or len(pattern) > _LONGEST:
                return cls({}, readable=False)
            values.setdefault(name[1].replace("\\.", "."), value)
        return cls(values)

    def value_for(self, module: str, default: T) -> T:
        """Return the number of a module, or `default`."""
        ends = {"^" + module, *_ends(module)}
        return next((value for name, value in self.values.items() if name in ends), default)


@dataclass(frozen=True, slots=True)
class LayerFilter:
    """Restricts the changed modules to some layers."""

    layers: frozenset[int]
    patterns: tuple[str, ...]  # names of the list that holds the layers, such as "layers". (): any.

    def matches(self, module: str) -> bool:
        for name, index in _LAYER.findall(module):
            if not self.patterns or name in self.patterns:
                return int(index) in self.layers
        return False


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The modules that an adapter changes."""

    names: frozenset[str] | None  # None: the settings have a regular expression or "all-linear"
    excluded: frozenset[str]
    layers: LayerFilter | None

    @classmethod
    def read(cls, fields: Fields) -> ModuleNames:
        names, excluded = _names(fields, "target_modules"), _names(fields, "exclude_modules")
        _names(fields, "target_parameters")
        named = names is not None and excluded is not None and _ALL_LINEAR not in names
        return cls(names if named else None, excluded or frozenset(), _layers(fields))

    def matches(self, module: str) -> bool | None:
        """Return whether the adapter changes the module. None: names do not tell."""
        if self.names is None:
            return None
        if is_named(module, self.excluded):
            return False
        if module in self.names:
            return True
        return is_named(module, self.names) and (self.layers is None or self.layers.matches(module))


def _names(fields: Fields, key: str) -> frozenset[str] | None:
    """Return a list of names, or None if the value is a regular expression."""
    if not fields.present(key):
        return frozenset()
    if fields.is_text(key):
        return frozenset((_ALL_LINEAR,)) if fields.text(key).lower() == _ALL_LINEAR else None
    names = fields.strings(key)
    if len(names) > MAX_NAMES:
        raise AdapterError(f"{fields.source}: {key} holds {len(names)} names, more than any model has modules")
    return frozenset(names)


def _layers(fields: Fields) -> LayerFilter | None:
    key = "layers_to_transform"
    if not fields.present(key):
        return None
    layers = [fields.integer(key, 0, 2**31)] if fields.is_integer(key) else fields.list_of_integers(key)
    if not layers:
        return None
    patterns: list[str] = []
    if fields.present("layers_pattern"):
        one = fields.is_text("layers_pattern")
        patterns = [fields.text("layers_pattern")] if one else fields.strings("layers_pattern")
    return LayerFilter(frozenset(layers), tuple(patterns))

"""Parses one call as a JSON object while the model writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.formats.base import BLANKS, CallableTool, arguments_rule
from aengine.text.answer.formats.partial_call import JsonPartialCall
from aengine.text.answer.lark import literal, sequence

_IN_STRING = re.compile(r'["\\]')
_IN_OBJECT = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class JsonValueScanner:
    """Finds the end of one JSON value by counting open brackets and quotes. Time is linear.

    first: the value's first character, which shows its kind.
    """

    __slots__ = ("_depth", "_escaped", "_quoted", "_scalar")

    def __init__(self, first: str) -> None:
        self._depth = 0  # open braces and brackets
        self._quoted = self._escaped = False
        self._scalar = first not in '"{['

    def read(self, text: str, at: int) -> tuple[int, bool]:
        """Read the value from `text[at:]`. Returns where its part of the text ends, and whether it ends there."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            if self._scalar:
                found = _AFTER_SCALAR.search(text, at)
                return (len(text), False) if found is None else (found.start(), True)
            found = (_IN_STRING if self._quoted else _IN_OBJECT).search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            self._step(found[0])
            if not self._depth and not self._quoted:
                return at, True
        return at, False

    def _step(self, character: str) -> None:
        if self._quoted:
            self._escaped = character == "\\"
            self._quoted = self._escaped
        elif character == '"':
            self._quoted = True
        else:
            self._depth += 1 if character in "{[" else -1


_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")  # models use either, whichever they were trained on


class JsonCallReader(JsonPartialCall):
    """Parses `{"name": ..., "arguments": {...}}`, given in any pieces and in any order of keys.

    A call has begun when its name, which must be in `names`, and the first brace of its arguments have come.

    tags: the markers around calls. opening: a text before the object, with blanks anywhere. opened: whether that text
    must be there.
    """

    __slots__ = ("_bare", "_expects", "_key", "_names", "_opening", "_role", "_scan", "_value")

    def __init__(
        self, names: Collection[str], tags: tuple[str, ...], opening: str = "", *, opened: bool = True
    ) -> None:
        super().__init__(tags)
        self._bare = not opened
        self._names = names
        self._opening = opening
        self._expects: Literal["opening", "object", "first key", "key", "colon", "value", "comma"] = (
            "opening" if opening else "object"
        )
        self._role: Literal["", "key", "name", "arguments", "other"] = ""  # of the value that is being read, if any
        self._key = ""
        self._value: list[str] = []
        self._scan = JsonValueScanner("")

    @property
    def begun(self) -> bool:
        return self.name is not None and self._json.begun

    def _read(self, text: str, at: int) -> int:
        if self._role:
            return self._read_value(text, at)
        if text[at] in BLANKS:
            return at + 1
        self.broken = not self._structure(text[at])
        return at if self.broken or self._role else at + 1  # a value's reader also reads its first character

    def _structure(self, character: str) -> bool:
        """Parse a character between values, or begin a value. Returns False if the character does not belong here."""
        match self._expects:
            case "opening" if character == self._opening[0]:
                self._opening = self._opening[1:]
                self._expects = "opening" if self._opening else "object"
            case "opening" if character == "{" and self._bare:
                self._expects = "first key"
            case "object" if character == "{":
                self._expects = "first key"
            case "first key" | "key" if character == '"':
                self._role = "key"
                self._scan = JsonValueScanner(character)
            case "colon" if character == ":":
                self._expects = "value"
            case "value":
                return self._begin_value(character)
            case "comma" if character == ",":
                self._expects = "key"
            case "comma" | "first key" if character == "}" and self.name is not None:
                if not self._json.begun:
                    self._read_arguments("{}", 0)
                self.done = True
            case _:
                return False
        return True

    def _begin_value(self, character: str) -> bool:
        self._scan = JsonValueScanner(character)
        if self._key in _NAME_KEYS and self.name is None:
            self._role = "name"
            return character == '"'
        if self._key in _ARGUMENT_KEYS and not self._json.begun:
            self._role = "arguments"
            return True
        self._role = "other"
        return character not in ",:}]"

    def _read_value(self, text: str, at: int) -> int:
        """Parse more of a value. Returns where its part of the text ends."""
        if self._role == "arguments":
            return self._read_arguments(text, at)
        end, ended = self._scan.read(text, at)
        if self._role != "other":
            self._value.append(text[at:end])
        if ended:
            self._end_value()
        return end

    def _read_arguments(self, text: str, at: int) -> int:
        at = super()._read_arguments(text, at)
        if self._json.done:
            self._role, self._expects = "", "comma"
        return at

    def _end_value(self) -> None:
        role, self._role = self._role, ""
        self._expects = "colon" if role == "key" else "comma"
        if role == "other":
            return
        try:
            value = json.loads("".join(self._value))
        except ValueError:  # for example a line break within a string
            self.broken = True
            return
        self._value.clear()
        if role == "key":
            self._key = value
        elif value in self._names:
            self.name = value
        else:
            self.broken = True


class KeyedCallReader(JsonCallReader):
    """Parses `{"the name": {...}}`. Other objects are parsed as `JsonCallReader` does."""

    __slots__ = ()

    def _begin_value(self, character: str) -> bool:
        if self.name is None and self._key in self._names:
            self.name, self._role = self._key, "arguments"
            return True
        return super()._begin_value(character)


def keyed_call_rules(rule: str, tool: CallableTool) -> list[str]:
    """Return rules of a call as a JSON object whose only key is its name."""
    parts = literal(f"{{{json.dumps(tool.name)}: "), f"{rule}_arguments", literal("}")
    return [f"{rule}: {sequence(*parts)}", arguments_rule(rule, tool)]


def json_call_rules(rule: str, tool: CallableTool, key: str, extra: str = "", name: str = '"name"') -> list[str]:
    """Return rules of a call as a JSON object with its name, and with its arguments under `key`.

    extra: text that may follow the arguments, in Lark's notation. name: the key of the name, and what precedes it.
    """
    head = f'{{{name}: {json.dumps(tool.name)}, "{key}": '
    return [
        f"{rule}: {sequence(literal(head), f'{rule}_arguments', extra, literal('}'))}",
        arguments_rule(rule, tool),
    ]

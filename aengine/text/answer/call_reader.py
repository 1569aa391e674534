"""One call's JSON object, read while it is being written."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.syntax import ARGUMENT_KEYS

_BLANKS = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_IN_OBJECT = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[ \t\r\n,}\]]")


class CallReader:
    """Takes the text of `{"name": ..., "arguments": {...}}` in any pieces and in any order of keys.

    A call has begun as soon as its name, one of `names`, and its arguments' first brace are there: what then comes
    of the arguments can be taken as it comes, unchecked. Until then `raw` has all the text. Time is linear.
    """

    __slots__ = (
        "_arguments",
        "_depth",
        "_escaped",
        "_expects",
        "_key",
        "_names",
        "_quoted",
        "_role",
        "_scalar",
        "_value",
        "broken",
        "done",
        "has_arguments",
        "name",
        "raw",
    )

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.has_arguments = False
        self.done = False  # the object is closed
        self.broken = False  # the next character cannot be part of a call
        self.raw: list[str] = []
        self._arguments: list[str] = []  # not taken yet
        self._expects: Literal["object", "first key", "key", "colon", "value", "comma"] = "object"
        self._role: Literal["", "key", "name", "arguments", "other"] = ""  # of the value that is being read, if any
        self._key = ""
        self._value: list[str] = []
        self._depth = 0  # open braces and brackets of the value
        self._quoted = self._escaped = self._scalar = False

    @property
    def begun(self) -> bool:
        """Whether the call is one; it stays one from then on."""
        return self.name is not None and self.has_arguments

    def feed(self, text: str) -> int:
        """Read on; how many characters belong to the object. All of them, unless it is then done or broken."""
        at = 0
        while at < len(text) and not self.done and not self.broken:
            if self._role:
                at = self._read_value(text, at)
            elif text[at] in _BLANKS:
                at += 1
            elif not self._structure(text[at]):
                self.broken = True
            elif not self._role:
                at += 1
        if not self.begun:
            self.raw.append(text[:at])
        return at

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; nothing before the call has begun."""
        if not self.begun:
            return ""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    def _structure(self, character: str) -> bool:
        """Take a character between values, or begin the value that it starts. False: it does not belong here."""
        match self._expects:
            case "object" if character == "{":
                self._expects = "first key"
            case "first key" | "key" if character == '"':
                self._role = "key"
            case "colon" if character == ":":
                self._expects = "value"
            case "value":
                return self._begin_value(character)
            case "comma" if character == ",":
                self._expects = "key"
            case "comma" | "first key" if character == "}" and self.name is not None:
                if not self.has_arguments:
                    self.has_arguments = True
                    self._arguments.append("{}")
                self.done = True
            case _:
                return False
        return True

    def _begin_value(self, character: str) -> bool:
        self._scalar = character not in '"{['
        if self._key == "name" and self.name is None:
            self._role = "name"
            return character == '"'
        if self._key in ARGUMENT_KEYS and not self.has_arguments:
            self._role = "arguments"
            self.has_arguments = character == "{"
            return self.has_arguments
        self._role = "other"
        return character not in ",:}]"

    def _read_value(self, text: str, at: int) -> int:
        """Read on in a value; where the part of the text ends that belongs to it."""
        begin, ended = at, False
        while at < len(text) and not ended:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            if self._scalar:
                found = _AFTER_SCALAR.search(text, at)
                at, ended = (len(text), False) if found is None else (found.start(), True)
                continue
            found = (_IN_STRING if self._quoted else _IN_OBJECT).search(text, at)
            if found is None:
                at = len(text)
                continue
            at = found.end()
            self._step(found[0])
            ended = not self._depth and not self._quoted
        if self._role == "arguments":
            self._arguments.append(text[begin:at])
        elif self._role != "other":
            self._value.append(text[begin:at])
        if ended:
            self._end_value()
        return at

    def _step(self, character: str) -> None:
        if self._quoted:
            self._escaped = character == "\\"
            self._quoted = self._escaped
        elif character == '"':
            self._quoted = True
        else:
            self._depth += 1 if character in "{[" else -1

    def _end_value(self) -> None:
        role, self._role, self._scalar = self._role, "", False
        self._expects = "colon" if role == "key" else "comma"
        if role not in ("key", "name"):
            return
        try:
            value = json.loads("".join(self._value))
        except ValueError:  # such as a line break within a string
            self.broken = True
            return
        self._value.clear()
        if role == "key":
            self._key = value
        elif value in self._names:
            self.name = value
        else:
            self.broken = True

"""Parses one call's JSON object while it is being written."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.formats.base import CallableTool, object_schema
from aengine.text.answer.json_value import JsonValue
from aengine.text.answer.lark import json_value, literal, sequence

_BLANKS = " \t\r\n"
_ARGUMENT_KEYS = ("arguments", "parameters")  # either is understood, whichever the model was trained on


class JsonCallReader:
    """Parses `{"name": ..., "arguments": {...}}`, given in any pieces and in any order of keys.

    A call has begun as soon as its name, one of `names`, and its arguments' first brace are there: what then comes
    of the arguments can be taken as it comes, unchecked. Until then `raw` has all the text. Time is linear.

    opening: a character that must stand before the object.
    """

    __slots__ = (
        "_arguments",
        "_expects",
        "_key",
        "_names",
        "_opening",
        "_role",
        "_scan",
        "_value",
        "broken",
        "done",
        "has_arguments",
        "id",
        "name",
        "raw",
    )

    id: str | None

    def __init__(self, names: Collection[str], opening: str = "") -> None:
        self._names = names
        self._opening = opening
        self.id = None
        self.name: str | None = None
        self.has_arguments = False
        self.done = False  # the object is closed
        self.broken = False  # the next character cannot be part of a call
        self.raw: list[str] = []
        self._arguments: list[str] = []  # not taken yet
        self._expects: Literal["opening", "object", "first key", "key", "colon", "value", "comma"] = (
            "opening" if opening else "object"
        )
        self._role: Literal["", "key", "name", "arguments", "other"] = ""  # of the value that is being read, if any
        self._key = ""
        self._value: list[str] = []
        self._scan = JsonValue("")

    @property
    def begun(self) -> bool:
        """Whether the text is a call; it stays one from then on."""
        return self.name is not None and self.has_arguments

    def feed(self, text: str) -> int:
        """Parse more text; returns how many characters belong to the object. All of them, unless it is then done or
        broken.
        """
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
        """The arguments that have come since the last time; nothing before the call has begun."""
        if not self.begun:
            return ""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    def _structure(self, character: str) -> bool:
        """Parse a character between values, or begin the value that it starts. False: it does not belong here."""
        match self._expects:
            case "opening" if character == self._opening:
                self._expects = "object"
            case "object" if character == "{":
                self._expects = "first key"
            case "first key" | "key" if character == '"':
                self._role = "key"
                self._scan = JsonValue(character)
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
        self._scan = JsonValue(character)
        if self._key == "name" and self.name is None:
            self._role = "name"
            return character == '"'
        if self._key in _ARGUMENT_KEYS and not self.has_arguments:
            self._role = "arguments"
            self.has_arguments = character == "{"
            return self.has_arguments
        self._role = "other"
        return character not in ",:}]"

    def _read_value(self, text: str, at: int) -> int:
        """Parse more of a value; returns where the part of the text ends that belongs to it."""
        end, ended = self._scan.read(text, at)
        if self._role == "arguments":
            self._arguments.append(text[at:end])
        elif self._role != "other":
            self._value.append(text[at:end])
        if ended:
            self._end_value()
        return end

    def _end_value(self) -> None:
        role, self._role = self._role, ""
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


def json_call_rules(rule: str, tool: CallableTool, key: str, behind: str = "") -> list[str]:
    """Grammar rules of a call as such an object, with the arguments under `key`; `behind`: what may follow them, as
    Lark has it.
    """
    head = f'{{"name": {json.dumps(tool.name)}, "{key}": '
    return [
        f"{rule}: {sequence(literal(head), f'{rule}_arguments', behind, literal('}'))}",
        f"{rule}_arguments: {json_value(object_schema(tool), tool.where, lenient=not tool.strict)}",
    ]

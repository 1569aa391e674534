"""Calls after `[TOOL_CALLS]`, in Mistral's two notations.

`name[ARGS]{...}`: Mistral Small 3.2, Magistral, Devstral and later. A list of JSON objects: Mistral 7B v0.3, Nemo,
Large, Small 3.1.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.formats.base import (
    BLANKS,
    CallableTool,
    CallFormat,
    CallReader,
    CallSyntax,
    Tools,
    arguments_rule,
)
from aengine.text.answer.formats.json_call import JsonCallReader, json_call_rules
from aengine.text.answer.formats.partial_call import JsonPartialCall
from aengine.text.answer.lark import Tokens, literal, marker, sequence

_BEGIN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTERS = string.ascii_letters + string.digits
_ID = "[A-Za-z0-9]{9}"  # chat templates refuse calls with any other id
_WRITTEN_ID = f'(/, "id": "{_ID}"/)?'
_NAME = re.compile(r"[\w.-]*")


class Mistral(CallFormat):
    syntax = CallSyntax(begin=_BEGIN, after_name=_ARGS, between="", noise=" \t\r\n}", inner=(_CALL_ID, _ARGS))

    def detect(self, template: str) -> bool:
        return _BEGIN in template and _ARGS in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return NamedCallReader(tools, self.syntax.markers)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        written_id = f"({marker(_CALL_ID, tokens)} /{_ID}/)?" if _CALL_ID in tokens else ""
        return [
            f"{rule}: {sequence(literal(tool.name), written_id, marker(_ARGS, tokens), f'{rule}_arguments')}",
            arguments_rule(rule, tool),
        ]

    def new_id(self) -> str:
        return _new_id()


class MistralList(CallFormat):
    syntax = CallSyntax(
        begin=_BEGIN,
        opening=r"/ ?\[/",
        separator=", ",
        closing="]",
        end="]",
        further="{",
        noise=" \t\r\n,}",
    )

    def detect(self, template: str) -> bool:
        return _BEGIN in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return JsonCallReader(tools, self.syntax.markers, opening="[" if first else "")

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        return json_call_rules(rule, tool, "arguments", extra=_WRITTEN_ID)

    def new_id(self) -> str:
        return _new_id()


def _new_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class NamedCallReader(JsonPartialCall):
    """Parses `name[CALL_ID]id[ARGS]{...}`; either marker may be missing. The call has begun with the first brace."""

    __slots__ = ("_names", "_state", "_tag", "_word")

    def __init__(self, names: Collection[str], tags: tuple[str, ...]) -> None:
        super().__init__(tags)
        self._names = names
        self._state: Literal["name", "marker", "id", "arguments"] = "name"
        self._word: list[str] = []  # pieces of a name or an id
        self._tag = ""  # the beginning of a marker

    @property
    def begun(self) -> bool:
        return self._json.begun

    def _read(self, text: str, at: int) -> int:
        if self._state == "arguments":
            at = self._read_arguments(text, at)
            self.done = self._json.done
            return at
        if text[at] in BLANKS and not self._tag:
            self._end_word()
            return at + 1
        return self._read_marker(text, at) if self._state == "marker" else self._read_word(text, at)

    def _read_word(self, text: str, at: int) -> int:
        found = _NAME.match(text, at)
        end = at if found is None else found.end()
        self._word.append(text[at:end])
        if end < len(text):
            self._end_word()
            self.broken = self.broken or self._state in ("name", "id")
        return end

    def _end_word(self) -> None:
        """End a name or an id, if one has begun."""
        word = "".join(self._word)
        self._word.clear()
        if not word:
            return
        if self._state == "id":
            self.id = word if re.fullmatch(_ID, word) else None
        elif word in self._names:
            self.name = word
        else:
            self.broken = True
            return
        self._state = "marker"

    def _read_marker(self, text: str, at: int) -> int:
        tag = self._tag + text[at]
        known = ("{", _ARGS, _CALL_ID)
        if not any(each.startswith(tag) for each in known):
            self.broken = True
            return at
        self._tag = "" if tag in known else tag
        if tag in ("{", _ARGS):
            self._state = "arguments"
        if tag == "{":
            return at  # the brace belongs to the object
        if tag == _CALL_ID:
            self._state = "id"
        return at + 1

    def close(self) -> None:
        self._json.end()
        if self._json.done and not self.done:
            self.done = True
            self._arguments.append(self._json.take())
        super().close()

"""`call:name{key:value}` between `<|tool_call>` and `<tool_call|>`, strings in quotes of their own: Gemma 4."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.formats.base import CallableTool, CallReader, CallSyntax, Tools, call_id, object_schema
from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.gemma_literal import END, QUOTE, GemmaObject
from aengine.text.answer.formats.values.gemma_rules import GemmaRules
from aengine.text.answer.formats.values.schemas import check_parameters
from aengine.text.answer.lark import Tokens, literal, sequence

_CALL = "call:"
_BLANKS = " \t\r\n"
_NAME = re.compile(r"[\w.-]*")


class Gemma4:
    syntax = CallSyntax(begin="<|tool_call>", closing=END, end=END, between="", inner=(QUOTE,))

    def detect(self, template: str) -> bool:
        return "<|tool_call>" in template and _CALL in template and QUOTE in template

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return GemmaCallReader(tools)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        check_parameters(tool)
        rules = GemmaRules(tool, tokens)
        rules.members(f"{rule}_members", object_schema(tool), tool.where)
        head = literal(f"{_CALL}{tool.name}{{")
        return [f"{rule}: {sequence(head, f'{rule}_members', literal('}'))}", *rules.rules]

    def new_id(self) -> str:
        return call_id()


class GemmaCallReader(PartialCall):
    """Parses `call:name{key:value, ...}`. The call has begun with the brace."""

    __slots__ = ("_name", "_names", "_object", "_state", "_word")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._state: Literal["call", "name", "arguments"] = "call"
        self._word = ""  # the beginning of `call:`
        self._name: list[str] = []
        self._object = GemmaObject()

    @property
    def begun(self) -> bool:
        return self._state == "arguments"

    def _read(self, text: str, at: int) -> int:
        match self._state:
            case "call":
                return self._read_call(text, at)
            case "name":
                return self._read_name(text, at)
        at = self._object.feed(text, at)
        self.done = self._object.done
        if self._object.broken:
            self._break(self._object.tag)
        self._arguments.append(self._object.take())
        return at

    def _close(self) -> None:
        if not self._object.done:
            self._object.close()
            self._arguments.append(self._object.take())

    def _read_call(self, text: str, at: int) -> int:
        if not self._word and text[at] in _BLANKS:
            return at + 1
        self._word += text[at]
        if not _CALL.startswith(self._word):
            self.broken = True
            return at
        if self._word == _CALL:
            self._state = "name"
        return at + 1

    def _read_name(self, text: str, at: int) -> int:
        found = _NAME.match(text, at)
        end = at if found is None else found.end()
        if end > at:
            self._name.append(text[at:end])
            return end
        name = "".join(self._name)
        if text[at] != "{" or name not in self._names:
            self.broken = True
            return at
        self.name, self._state = name, "arguments"
        return at + 1

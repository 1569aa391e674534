"""A name and JSON on lines of their own, without markers: GLM-4 and GLM-4-0414.

An answer may begin with a call. Each further one follows `<|assistant|>`, which begins a new turn.
"""

from __future__ import annotations

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
from aengine.text.answer.formats.partial_call import JsonPartialCall
from aengine.text.answer.lark import Tokens, pattern, sequence


class Glm4(CallFormat):
    syntax = CallSyntax(
        begin="<|assistant|>",
        after_bare_name="\n",
        noise=" \t\r\n}",  # an extra brace is ignored
        between="",
    )

    def detect(self, template: str) -> bool:
        return "请使用 Json 格式表示调用的参数" in template  # "write the arguments of a call as JSON"

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return NameAndJsonReader(tools, self.syntax.markers)

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        # The lexer is greedy: with the line breaks after a thought in a terminal of their own, text would win.
        name = f"/\\n{{0,2}}{pattern(f'{tool.name}{self.syntax.after_bare_name}')}/"
        return [f"{rule}: {sequence(name, f'{rule}_arguments')}", arguments_rule(rule, tool)]


class NameAndJsonReader(JsonPartialCall):
    """Parses a name, a line break and a JSON object. The call has begun with the object's brace."""

    __slots__ = ("_names", "_state", "_word")

    def __init__(self, tools: Tools, tags: tuple[str, ...]) -> None:
        super().__init__(tags)
        self._names = frozenset(tools)
        self._state: Literal["start", "name", "brace", "arguments"] = "start"
        self._word = ""  # the beginning of a name

    @property
    def begun(self) -> bool:
        return self._json.begun

    def _read(self, text: str, at: int) -> int:
        if self._state == "arguments":
            at = self._read_arguments(text, at)
            self.done = self._json.done
            return at
        character = text[at]
        if self._state == "name" and character == "\n" and self._word in self._names:
            self.name, self._state = self._word, "brace"
        elif character in BLANKS and self._state != "name":
            return at + 1
        elif self._state == "brace":
            self.broken = character != "{"
            self._state = "arguments"
            return at
        else:
            self._state, self._word = "name", self._word + character
            self.broken = not any(name.startswith(self._word) for name in self._names)
            return at if self.broken else at + 1
        return at + 1

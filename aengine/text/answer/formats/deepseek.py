"""A name and JSON, each call between markers and all calls between others: DeepSeek V3, R1, V3.1 and later."""

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
from aengine.text.answer.lark import Tokens, literal, marker, sequence
from aengine.text.answer.marker_search import MarkerSearch

_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE, _FENCE_END = "\n```json\n", "\n```"
_FENCE_MARK = "```"
_KIND = "function"
_LONGEST = 256  # characters of a name and the text around it


class DeepSeek(CallFormat):
    """The formats of DeepSeek.

    fenced: V3's notation, `function<sep>name` with the arguments in a fence; else `name<sep>arguments`.
    """

    def __init__(self, *, fenced: bool) -> None:
        self.syntax = CallSyntax(
            begin=_BEGIN,
            separator="\n" if fenced else "",
            closing=_END,
            end=_END,
            further="<",
            unmarked=_CALL,
            inner=(_CALL, _SEPARATOR, _CALL_END),
        )
        self._fenced = fenced

    def detect(self, template: str) -> bool:
        return _BEGIN in template and ("```json" in template) == self._fenced

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return DeepSeekReader(tools, (*self.syntax.markers, *([_FENCE_MARK] if self._fenced else [])))

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        begin, separator = marker(_CALL, tokens), marker(_SEPARATOR, tokens)
        head, tail = [begin, literal(tool.name), separator], ""
        if self._fenced:
            head, tail = [begin, literal(_KIND), separator, literal(f"{tool.name}{_FENCE}")], literal(_FENCE_END)
        return [
            f"{rule}: {sequence(*head, f'{rule}_arguments', tail, marker(_CALL_END, tokens))}",
            arguments_rule(rule, tool),
        ]


class DeepSeekReader(JsonPartialCall):
    """Parses a call of either version. The call has begun with the first brace of the arguments."""

    __slots__ = ("_length", "_search", "_state", "_tag", "_tools", "_word")

    def __init__(self, tools: Tools, tags: tuple[str, ...]) -> None:
        super().__init__(tags)
        self._tools = tools
        self._state: Literal["marker", "kind", "name", "arguments", "end"] = "marker"
        self._tag = ""  # text that may become the first marker or an end of the call
        self._word: list[str] = []  # pieces of the text before the separator, or of the name
        self._length = 0
        self._search = MarkerSearch(_SEPARATOR)

    @property
    def begun(self) -> bool:
        return self._json.begun

    def _read(self, text: str, at: int) -> int:
        match self._state:
            case "marker":
                return self._read_marker(text, at)
            case "kind":
                return self._read_kind(text, at)
            case "name":
                return self._read_name(text, at)
            case "arguments":
                return self._read_arguments(text, at)
        return self._read_end(text, at)

    def _read_marker(self, text: str, at: int) -> int:
        if not self._tag and text[at] in BLANKS:
            return at + 1
        tag = self._tag + text[at]
        if not _CALL.startswith(tag):
            self.broken = True
            return at
        self._tag = tag
        if tag == _CALL:
            self._state, self._tag = "kind", ""
        return at + 1

    def _read_kind(self, text: str, at: int) -> int:
        """Parse the text before the separator, one character at a time: the word `function`, or a name."""
        before, rest = self._search.feed(text[at])
        self._word.append(before)
        self._length += 1
        if rest is not None:
            word = "".join(self._word).strip()
            self._state, self._word = "name", [] if word == _KIND and word not in self._tools else [f"{word}\n"]
        self.broken = self._length > _LONGEST
        return at + 1

    def _read_name(self, text: str, at: int) -> int:
        """Parse up to the arguments: the name, if none has come, and perhaps a fence. There may be no arguments."""
        if text[at] not in '{["<':
            self._word.append(text[at])
            self._length += 1
            self.broken = self._length > _LONGEST
            return at if self.broken else at + 1
        name, *others = "".join(self._word).split() or [""]
        others = [word for word in others if word not in ("```json", "```")]
        ends = text[at] == "<"
        self.broken = name not in self._tools or others not in ([], ["null"] if ends else [])
        self.name, self._state = name, "end" if ends else "arguments"
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        at = self._json.feed(text, at)
        self.broken = self._json.broken and not self._json.begun
        if self._json.broken and self._json.begun:
            self._json.close()
        if self._json.begun:
            self._arguments.append(self._json.take())
        if self._json.done:
            self._state = "end"
            self._read_left(self._json.left)
        return at

    def _read_left(self, text: str) -> None:
        """Parse text that the arguments' parser returned: the tag that ended a string. A word there is ignored."""
        at = 0
        while at < len(text) and text[0] in "<`" and not self.done and not self.broken:
            at = self._read_end(text, at)
        self.left += text[at:] if at else ""

    def settle(self) -> str:
        """See `CallReader`."""
        left = super().settle()
        if left:
            self.broken = False
            self._read_arguments("", 0)
        return left

    def _read_end(self, text: str, at: int) -> int:
        if not self._tag and text[at] in f"{BLANKS}`}}":  # an extra brace is ignored
            return at + 1
        tag = self._tag + text[at]
        if not _CALL_END.startswith(tag) and not _END.startswith(tag):
            self._break(self._tag)
            return at
        self._tag = tag
        self.done = tag in (_CALL_END, _END)
        if self.done and not self._json.begun:
            self._read_arguments("{}", 0)
        return at + 1

"""A name and JSON, each call between markers and all calls between others: DeepSeek V3, R1, V3.1 and later, Kimi K2."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

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


class _Markers(NamedTuple):
    begin: str
    call: str
    separator: str
    call_end: str
    end: str


_DEEPSEEK = _Markers(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
_KIMI = _Markers(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_KIMI_ID = re.compile(r"functions\.(.+):\d+")
_FENCE, _FENCE_END = "\n```json\n", "\n```"
_FENCE_MARK = "```"
_KIND = "function"
_LONGEST = 256  # characters of a name and the text around it


class DeepSeek(CallFormat):
    """The formats of DeepSeek and Kimi.

    fenced: V3's notation, `function<sep>name` with the arguments in a fence; else `name<sep>arguments`.
    """

    markers = _DEEPSEEK

    def __init__(self, *, fenced: bool) -> None:
        own = self.markers
        self.syntax = CallSyntax(
            begin=own.begin,
            separator="\n" if fenced else "",
            closing=own.end,
            end=own.end,
            further="<",
            unmarked=own.call,
            inner=(own.call, own.separator, own.call_end),
        )
        self._fenced = fenced

    def detect(self, template: str) -> bool:
        return self.markers.begin in template and ("```json" in template) == self._fenced

    def reader(self, tools: Tools, first: bool) -> CallReader:
        return DeepSeekReader(tools, self.markers, (*self.syntax.markers, *([_FENCE_MARK] if self._fenced else [])))

    def rules(self, rule: str, tool: CallableTool, tokens: Tokens) -> list[str]:
        begin, separator = marker(self.markers.call, tokens), marker(self.markers.separator, tokens)
        head, tail = [begin, *self._name(tool.name), separator], ""
        if self._fenced:
            head, tail = [begin, literal(_KIND), separator, literal(f"{tool.name}{_FENCE}")], literal(_FENCE_END)
        return [
            f"{rule}: {sequence(*head, f'{rule}_arguments', tail, marker(self.markers.call_end, tokens))}",
            arguments_rule(rule, tool),
        ]

    def _name(self, name: str) -> list[str]:
        """Return the parts of a rule that write a name without a fence."""
        return [literal(name)]


class Kimi(DeepSeek):
    """Kimi K2's format. A call has the id `functions.name:index` in place of its name; templates write it back."""

    markers = _KIMI

    def __init__(self) -> None:
        super().__init__(fenced=False)

    def _name(self, name: str) -> list[str]:
        return [literal(f"functions.{name}:"), "/[0-9]{1,3}/"]


class DeepSeekReader(JsonPartialCall):
    """Parses a call of either version. The call has begun with the first brace of the arguments."""

    __slots__ = ("_length", "_markers", "_search", "_state", "_tag", "_tools", "_word")

    def __init__(self, tools: Tools, markers: _Markers, tags: tuple[str, ...]) -> None:
        super().__init__(tags)
        self._tools = tools
        self._markers = markers
        self._state: Literal["marker", "kind", "name", "arguments", "end"] = "marker"
        self._tag = ""  # text that may become the first marker or an end of the call
        self._word: list[str] = []  # pieces of the text before the separator, or of the name
        self._length = 0
        self._search = MarkerSearch(markers.separator)

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
        if not self._markers.call.startswith(tag):
            self.broken = True
            return at
        self._tag = tag
        if tag == self._markers.call:
            self._state, self._tag = "kind", ""
        return at + 1

    def _read_kind(self, text: str, at: int) -> int:
        """Parse the text before the separator, one character at a time: the word `function`, or a name."""
        before, rest = self._search.feed(text[at])
        self._word.append(before)
        self._length += 1
        if rest is not None:
            word = "".join(self._word).strip()
            if (written := _KIMI_ID.fullmatch(word)) is not None and word not in self._tools:
                self.id, word = word, written[1]
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
        ends = self._markers.call_end, self._markers.end
        if not any(end.startswith(tag) for end in ends):
            self._break(self._tag)
            return at
        self._tag = tag
        self.done = tag in ends
        if self.done and not self._json.begun:
            self._read_arguments("{}", 0)
        return at + 1

"""Calls as `call:name{key:value}` between `<|tool_call>` and `<tool_call|>`, strings in their own quotes: Gemma 4."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.formats.base import (
    BLANKS,
    CallableTool,
    CallFormat,
    CallReader,
    CallSyntax,
    Tools,
    object_schema,
)
from aengine.text.answer.formats.gemma_rules import QUOTE, GemmaRules
from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.python_literal import WORDS
from aengine.text.answer.formats.values.raw_text import refuse_constant
from aengine.text.answer.formats.values.schemas import check_parameters
from aengine.text.answer.formats.values.unclosed_strings import HeldBrackets
from aengine.text.answer.lark import Tokens, literal, sequence
from aengine.text.answer.marker_search import MarkerSearch

END = "<tool_call|>"  # follows the object; a string without its quote ends there
_WORD = re.compile(r"[^\s,:<>{}\[\]]*")

Expects = Literal["key or end", "key", "colon", "value or end", "value", "comma", "nothing"]


class GemmaObject(HeldBrackets):
    """Converts the text after an object's opening brace to JSON, given in any pieces. Time is linear."""

    __slots__ = ("_comma", "_expects", "_quoted", "_search", "_word", "broken", "tag")

    _outer_closers = "}]"
    _held_back = _outer_closers + BLANKS

    def __init__(self) -> None:
        super().__init__()
        self.broken = False  # whether the next character cannot be part of the object
        self._pieces.append("{")
        self._closers.append("}")
        self._comma = False  # whether a comma has come and nothing since
        self._expects: Expects = "key or end"
        self._quoted = False  # whether a string is open
        self._search = MarkerSearch(QUOTE, END)
        self.tag = ""  # text that may become a quote; once the object is broken, the tag that follows it
        self._word: list[str] = []  # the beginning of a bare key or value

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._expects == "nothing"

    def feed(self, text: str, at: int) -> int:
        """Parse some of `text[at:]`. Returns where to continue."""
        if self._quoted:
            return self._read_string(text, at)
        if self.tag or text[at] == "<":
            return self._read_quote(text, at)
        found = _WORD.match(text, at)
        end = at if found is None else found.end()
        if end > at:
            self._word.append(text[at:end])
            return end
        if (self._word and not self._end_word()) or (text[at] not in BLANKS and not self._take(text[at])):
            self.broken = True
        return at if self.broken else at + 1

    def close(self) -> None:
        """Close everything that is open, so that the result is JSON."""
        if self._quoted:
            self._pass(self._search.flush())
            self._drop_closing_brackets()
            self._end_string()
        elif self._word:
            self._end_word()
        if self._expects in ("colon", "value") and not self._comma:
            self._pieces.append(": null" if self._expects == "colon" else "null")
        self._pieces += reversed(self._closers)
        self._closers.clear()
        self._expects = "nothing"

    def _take(self, character: str) -> bool:
        """Parse a character between words. Returns False if it does not belong here."""
        if character == self._closers[-1] and (self._comma or self._expects in ("key or end", "value or end", "comma")):
            self._pieces.append(self._closers.pop())
            self._comma = False
            self._expects = "comma" if self._closers else "nothing"
        elif character == "," and self._expects == "comma":
            self._comma = True
            self._expects = "key" if self._closers[-1] == "}" else "value"
        elif character == ":" and self._expects == "colon":
            self._pieces.append(": ")
            self._expects = "value"
        elif character in "{[" and self._expects in ("value", "value or end"):
            self._begin(character)
            self._closers.append("}" if character == "{" else "]")
            self._expects = "key or end" if character == "{" else "value or end"
        else:
            return False
        return True

    def _begin(self, text: str) -> None:
        self._pieces.append(f", {text}" if self._comma else text)
        self._comma = False

    def _end_word(self) -> bool:
        word = "".join(self._word)
        self._word.clear()
        if self._expects in ("key", "key or end"):
            self._begin(json.dumps(word, ensure_ascii=False))
        elif self._expects in ("value", "value or end"):
            self._begin(_value(word))
        else:
            return False
        self._end_text()
        return True

    def _end_text(self) -> None:
        self._expects = "colon" if self._expects in ("key", "key or end") else "comma"

    def _read_quote(self, text: str, at: int) -> int:
        tag = self.tag + text[at]
        if not QUOTE.startswith(tag) or self._word or self._expects in ("colon", "comma"):
            self.broken = True
            return at
        self.tag = "" if tag == QUOTE else tag
        if tag == QUOTE:
            self._quoted = True
            self._begin('"')
        return at + 1

    def _read_string(self, text: str, at: int) -> int:
        before, rest = self._search.feed(text[at:])
        self._pass(before)
        if rest is None:
            return len(text)
        if self._search.found == END:
            self._drop_closing_brackets()
            self.broken, self.tag = True, END
        self._end_string()
        return len(text) - len(rest)

    def _end_string(self) -> None:
        self._write_text("")
        self._pieces.append('"')
        self._quoted = False
        self._end_text()

    def _write_text(self, text: str) -> None:
        self._pieces.append(json.dumps(self._brackets + text, ensure_ascii=False)[1:-1])
        self._brackets = ""


def _value(word: str) -> str:
    """Return a bare value as JSON: a number, true, false or null, else a text."""
    if word in WORDS:
        return WORDS[word]
    try:
        json.loads(word, parse_constant=refuse_constant)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return word


_CALL = "call:"
_NAME = re.compile(r"[\w.-]*")


class Gemma4(CallFormat):
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
        if not self._word and text[at] in BLANKS:
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

"""Converts a call's arguments to a JSON object while the model writes them."""

from __future__ import annotations

import json
import re
from types import MappingProxyType
from typing import Literal

from aengine.text.answer.formats.base import BLANKS
from aengine.text.answer.formats.values.python_literal import WORDS, number
from aengine.text.answer.formats.values.unclosed_strings import UnclosedStrings
from aengine.text.answer.marker_search import MarkerSearch

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_MAY_BE_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_CLOSERS = {"{": "}", "[": "]"}
_NOTHING = ("", "null", "None", "[]")  # some models write these if there are no arguments

Expects = Literal["start", "key or end", "colon", "value", "value or end", "comma", "nothing"]


class JsonArguments(UnclosedStrings):
    """Converts an object, given in any pieces. JSON passes unchanged. Time is linear.

    The object may be a string that holds JSON; `null` and `[]` stand for an empty one. The reader corrects the quotes,
    words and bare keys of other languages, extra commas, characters that need an escape, and missing brackets. It
    writes a key when the key's value begins.
    """

    __slots__ = ("_bracket", "_expects", "_held", "_is_text", "_key")

    _outer_closers = "}]"
    _held_back = _outer_closers + BLANKS
    _odd = MappingProxyType(
        {quote: re.compile(rf'["{quote}\\\x00-\x1f\ud800-\udfff]') for quote in "\"'"},
    )

    def __init__(self, tags: tuple[str, ...] = ()) -> None:
        """tags: the markers in and around the call."""
        super().__init__(tags)
        self._expects: Expects = "start"
        self._held: list[str] = []  # a comma, a key and its colon, until a value follows them
        self._key = False  # whether the open string is a key
        self._is_text = False  # whether the open string holds the object
        self._bracket = False  # whether a bracket has come in place of the object: of an empty list

    @property
    def begun(self) -> bool:
        """Whether it is certain that these are arguments."""
        return self._expects != "start"

    @property
    def done(self) -> bool:
        """Whether the object is complete."""
        return self._expects == "nothing"

    @property
    def quoted(self) -> bool:
        """Whether the next character is part of a string."""
        return bool(self._quote)

    def end(self) -> None:
        """Parse the end of the text: a word there is complete."""
        if self._word and not self._quote:
            self._end_word()

    def close(self) -> None:
        """Close everything that is open, so that the result is JSON."""
        if self._quote and not self._key and not self._is_text:
            self._pass(self._search.flush())
            self._drop_closing_brackets()
            self._write_text('"')
        elif self._expects in ("value", "value or end"):
            self.end()
        self._quote, self._expects = "", "nothing"
        self._pieces += reversed(self._closers)
        self._closers.clear()

    def _write(self, text: str) -> None:
        """Write text between values. Hold it back after a comma, until a value follows."""
        if self._expects != "start":
            (self._held if self._held else self._pieces).append(text)

    def _take(self, character: str) -> bool:
        expects = self._expects
        if character in BLANKS:
            self._write(character)
        elif character in "}]" and character in reversed(self._closers):  # closes several levels in linear time
            self._end_group(character)
        elif character == "," and expects == "comma":
            self._held.append(",")
            self._expects = "key or end" if self._closers[-1] == "}" else "value or end"
        elif character == ":" and expects == "colon":
            self._write(":")
            self._expects = "value"
        elif character in "\"'" and expects not in ("colon", "comma"):
            self._begin_string(character)
        elif character in _CLOSERS and expects in ("value", "value or end"):
            self._begin_value(character)
            self._closers.append(_CLOSERS[character])
            self._expects = "key or end" if character == "{" else "value or end"
        elif character == "{" and expects == "start" and not self._bracket:
            self._begin_value(character)
            self._closers.append("}")
            self._expects = "key or end"
        elif character == "[" and expects == "start" and not self._bracket:
            self._bracket = True
        elif character == "]" and expects == "start" and self._bracket:
            self._empty()
        else:
            return False
        return True

    def _end_group(self, closer: str) -> None:
        """Close everything that is open up to this bracket. The text held back has no value."""
        self._held.clear()
        while self._closers:
            self._pieces.append(self._closers.pop())
            if self._pieces[-1] == closer:
                break
        self._expects = "comma" if self._closers else "nothing"

    def _empty(self) -> None:
        self._pieces.append("{}")
        self._expects = "nothing"

    def _begin_value(self, text: str) -> None:
        self._pieces += [*self._held, text]
        self._held.clear()

    def _begin_string(self, quote: str) -> None:
        self._quote = quote
        self._search = MarkerSearch(*self._tags)
        self._key = self._expects == "key or end"
        self._is_text = self._expects == "start"
        if self._key:
            self._held.append('"')
        else:
            self._begin_value('"')

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        match self._expects:
            case "start" if word in _NOTHING and not self._bracket:
                self._empty()
            case "key or end":
                self._held.append(json.dumps(word, ensure_ascii=False))
                self._expects = "colon"
            case "value" | "value or end":
                self._begin_value(_value(word))
                self._expects = "comma"
            case _:
                self.broken, self.left = True, word

    def _read_odd(self, character: str) -> None:
        if character in BLANKS:
            super()._read_odd(character)
        else:
            self._write_text(json.dumps(character)[1:-1])

    def _read_escape(self, text: str, at: int) -> int:
        """Parse one more character of an escape. A backslash without a valid escape is text."""
        escape = self._escape + text[at]
        if _MAY_BE_ESCAPE.fullmatch(escape):
            self._escape = escape
            return at + 1
        known = escape if _ESCAPE.fullmatch(escape) else "'" if escape == "\\'" else ""
        self._write_text(known or "\\" + self._escape)
        self._escape = ""
        return at + 1 if known else at

    def _may_follow(self) -> str:
        return ":" if self._key else ",}]"

    def _write_text(self, text: str) -> None:
        if self._brackets:
            text = json.dumps(self._brackets)[1:-1] + text
            self._brackets = ""
        (self._held if self._key else self._pieces).append(text)

    def _end_string(self) -> None:
        self._write_text('"')
        self._quote = ""
        if self._is_text:
            self._read_text()
        else:
            self._expects = "colon" if self._key else "comma"

    def _read_text(self) -> None:
        """Parse arguments that the model wrote as a string."""
        text = json.loads(self.take())
        if text.strip() in _NOTHING:
            self._empty()
            return
        arguments = JsonArguments()
        arguments.feed(text)
        if not arguments.begun:
            self.broken = True
            return
        if not arguments.done:
            arguments.close()
        self._pieces.append(arguments.take())
        self._expects = "nothing"


def _value(word: str) -> str:
    """Return a word as JSON: a number, true, false or null, else a text."""
    if _NUMBER.fullmatch(word):
        return word
    return WORDS.get(word) or number(word) or json.dumps(word, ensure_ascii=False)

"""Converts a Python literal to JSON while the model writes it."""

from __future__ import annotations

import json
import math
from typing import Literal

from aengine.text.answer.formats.base import BLANKS
from aengine.text.answer.formats.values.unclosed_strings import QUOTE_OR_ESCAPE, UnclosedStrings
from aengine.text.answer.marker_search import MarkerSearch

WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}

Expects = Literal["value", "value or end", "key or end", "colon", "comma", "nothing"]


class LiteralReader(UnclosedStrings):
    """Converts one literal, given in any pieces: a string, number, True, False, None, list, tuple, dict, or JSON.

    Keys become strings. Time is linear.
    """

    __slots__ = ("_comma", "_expects")

    _outer_closers = ")]"
    _held_back = _outer_closers + BLANKS
    _odd = QUOTE_OR_ESCAPE

    def __init__(self, tags: tuple[str, ...] = ()) -> None:
        super().__init__(tags)
        self._expects: Expects = "value"
        self._comma = False  # whether a comma has come and nothing since

    @property
    def done(self) -> bool:
        """Whether the literal is complete. A number or name is complete when a character follows it, or with `end`."""
        return self._expects == "nothing"

    def end(self) -> None:
        """Parse the end of the text."""
        if self._word:
            self._end_word()

    def close(self) -> None:
        """Close everything that is open, so that the result is JSON."""
        self.end()
        if self._quote:
            self._pass(self._search.flush())
            self._drop_closing_brackets()
            self._end_string()
        if self._expects in ("colon", "value"):
            self._pieces.append(": null" if self._expects == "colon" else "null")
        self._pieces += ["}" if closer == "}" else "]" for closer in reversed(self._closers)]
        self._closers.clear()
        self._expects = "nothing"

    def _take(self, character: str) -> bool:
        if character in BLANKS:
            return True
        if (
            self._closers
            and character == self._closers[-1]
            and self._expects in ("value or end", "key or end", "comma")
        ):
            self._pieces.append("}" if self._closers.pop() == "}" else "]")
            self._comma, self._expects = False, "value"
            self._end_value()
        elif character == "," and self._expects == "comma":
            self._comma = True
            self._expects = "key or end" if self._closers[-1] == "}" else "value or end"
        elif character == ":" and self._expects == "colon":
            self._pieces.append(": ")
            self._expects = "value"
        elif character in "'\"" and self._may_begin():
            self._begin('"')
            self._quote = character
            self._search = MarkerSearch(*self._tags)
        elif character in "[({" and self._expects in ("value", "value or end"):
            self._begin("{" if character == "{" else "[")
            self._closers.append({"[": "]", "(": ")", "{": "}"}[character])
            self._expects = "key or end" if character == "{" else "value or end"
        else:
            return False
        return True

    def _may_begin(self) -> bool:
        return self._expects in ("value", "value or end", "key or end")

    def _begin(self, text: str) -> None:
        self._pieces.append(f", {text}" if self._comma else text)
        self._comma = False

    def _end_value(self) -> None:
        if self._expects == "key or end":
            self._expects = "colon"
        else:
            self._expects = "comma" if self._closers else "nothing"

    def _end_word(self) -> None:
        word = "".join(self._word)
        self._word.clear()
        value = WORDS.get(word) or number(word)
        if value is None or not self._may_begin():
            self.broken = True
            return
        self._begin(json.dumps(word) if self._expects == "key or end" else value)
        self._end_value()

    def _read_escape(self, text: str, at: int) -> int:
        escape, character = self._escape, text[at]
        kind = escape[1:2] or character
        if kind in _HEX_DIGITS:
            if len(escape) > 1 and character not in "0123456789abcdefABCDEF":
                return self._end_escape(escape, at)  # not an escape after all
            if len(escape) == 1 + _HEX_DIGITS[kind]:
                return self._end_escape(_character(int(escape[2:] + character, 16)), at + 1)
        elif kind in "01234567":
            if len(escape) > 1 and character not in "01234567":
                return self._end_escape(chr(int(escape[1:], 8)), at)
            if len(escape) == 3:
                return self._end_escape(chr(int(escape[1:] + character, 8)), at + 1)
        else:
            return self._end_escape(_ESCAPES.get(character, escape + character), at + 1)
        self._escape += character
        return at + 1

    def _end_escape(self, text: str, at: int) -> int:
        self._escape = ""
        self._write_text(text)
        return at

    def _end_string(self) -> None:
        self._write_text("")
        self._quote = ""
        self._pieces.append('"')
        self._end_value()

    def _write_text(self, text: str) -> None:
        if self._brackets:
            self._pieces.append(json.dumps(self._brackets)[1:-1])
            self._brackets = ""
        if text:
            self._pieces.append(json.dumps(text, ensure_ascii=_is_surrogate(text))[1:-1])

    def _may_follow(self) -> str:
        return ":" if self._expects == "key or end" else ",)]}"


def _character(code: int) -> str:
    return chr(code) if code < 0x110000 else "\ufffd"


def _is_surrogate(text: str) -> bool:
    return len(text) == 1 and "\ud800" <= text <= "\udfff"


def number(word: str) -> str | None:
    """Return a number as JSON writes it; None if the word is no number."""
    try:
        if math.isfinite(float(json.loads(word, parse_constant=float))):
            return word
    except (ValueError, OverflowError):
        pass
    for kind in (lambda text: int(text, 0), int, float):
        try:
            value = kind(word)
            return json.dumps(value) if math.isfinite(value) else None
        except (ValueError, OverflowError):
            continue
    return None

"""Finds the end of a string whose closing quote the model has left out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from aengine.text.answer.formats.base import BLANKS
from aengine.text.answer.marker_search import MarkerSearch

_WORD = re.compile(r"[\w.+-]*")
QUOTE_OR_ESCAPE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_LONGEST = 64  # closing brackets and blanks that are held back


class HeldBrackets(ABC):
    """The base of value readers: finds the closing brackets at the end of a string that has no closing quote.

    The brackets that close the open lists and objects do not belong to such a string.
    """

    __slots__ = ("_brackets", "_closers", "_pieces")

    _outer_closers: ClassVar[str]  # the brackets that close a call and a list of calls, in this order
    _held_back: ClassVar[str]  # these brackets and blanks

    def __init__(self) -> None:
        self._closers: list[str] = []  # the closing brackets of open lists and objects, innermost last
        self._brackets = ""  # closing brackets and blanks at the end of the string so far
        self._pieces: list[str] = []  # the JSON that has not been taken

    def take(self) -> str:
        """Return the new JSON."""
        pieces = "".join(self._pieces)
        self._pieces.clear()
        return pieces

    @abstractmethod
    def _write_text(self, text: str) -> None:
        """Write brackets that were held back, then text of the string."""

    def _pass(self, text: str) -> None:
        """Write text of the string, but hold back the brackets and blanks at its end."""
        kept = text.rstrip(self._held_back)
        if kept:
            self._write_text(kept)
        self._brackets += text[len(kept) :]
        if len(self._brackets) > _LONGEST:
            self._write_text("")

    def _drop_closing_brackets(self) -> None:
        """Drop blanks and the closing brackets of open lists and objects from the end of an unclosed string."""
        closers = "".join(reversed(self._closers)) + self._outer_closers
        written = "".join(self._brackets.split())
        count = next(count for count in range(len(closers), -1, -1) if written.endswith(closers[:count]))
        for _ in range(count):
            self._brackets = self._brackets.rstrip()[:-1]
        self._brackets = self._brackets.rstrip()


class UnclosedStrings(HeldBrackets):
    """The base of readers of values with strings.

    A string may hold any text. If its closing quote is missing, the first tag in the string ends it. So does the end
    of the text. Closing brackets of open lists and objects just before that end do not belong to the string. From a tag
    on, the text waits until the next quote. That quote closes the string if the value can go on after it.
    """

    __slots__ = (
        "_closes",
        "_escape",
        "_quote",
        "_search",
        "_tags",
        "_waiting",
        "_word",
        "broken",
        "left",
    )

    _odd: ClassVar[Mapping[str, re.Pattern[str]]]  # by quote: the characters of a string that are read one by one

    def __init__(self, tags: tuple[str, ...] = ()) -> None:
        """tags: the markers of the call and around it."""
        super().__init__()
        self.broken = False  # the next character cannot be part of the value
        self.left = ""  # text that was fed and follows the value: a word, or a tag and the text after it
        self._tags = tags
        self._quote = ""  # the quote of the open string; empty outside strings
        self._escape = ""  # the beginning of an escape in the string
        self._search = MarkerSearch()  # finds a tag in the string
        self._waiting: list[str] = []  # the string's text from a tag on
        self._closes = False  # whether the waiting text ends with a quote, and perhaps blanks
        self._word: list[str] = []  # pieces of a word outside strings: a number, a name or a bare key

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether the value is complete."""

    @abstractmethod
    def _take(self, character: str) -> bool:
        """Parse a character between words and strings. Returns False if it does not belong here."""

    @abstractmethod
    def _end_word(self) -> None:
        """Parse the word in `_word`, which is complete, and clear it."""

    @abstractmethod
    def _read_escape(self, text: str, at: int) -> int:
        """Parse one more character of an escape. Returns where to continue."""

    @abstractmethod
    def _end_string(self) -> None:
        """Write the quote that closes the string."""

    @abstractmethod
    def _may_follow(self) -> str:
        """Return the characters that may follow the string."""

    def feed(self, text: str, at: int = 0) -> int:
        """Parse `text[at:]`. Returns where the part of the text ends that belongs to the value."""
        while at < len(text) and not self.done and not self.broken:
            if self._quote:
                at = self._read_string(text, at)
                continue
            end = at if (found := _WORD.match(text, at)) is None else found.end()
            if end > at:
                self._word.append(text[at:end])
                at = end
            elif self._word:
                self._end_word()
            elif self._take(text[at]):
                at += 1
            else:
                self.broken = True
        return at

    def settle(self) -> str:
        """End the text: decide about the waiting text. Returns the part of it that follows the value."""
        if not self._waiting:
            return ""
        self._decide(closed=self._closes)
        left, self.left = self.left, ""
        return left

    def _read_string(self, text: str, at: int) -> int:
        """Parse some of the open string. Returns where to continue."""
        if self._waiting:
            return self._wait(text, at)
        if self._escape:
            return self._read_escape(text, at)
        found = self._odd[self._quote].search(text, at)
        end = len(text) if found is None else found.start()
        before, rest = self._search.feed(text[at:end])
        self._pass(before)
        if rest is not None:
            self._waiting.append(self._search.found)
            return end - len(rest)
        if found is None:
            return end
        self._pass(self._search.flush())
        if found[0] == "\\":
            self._escape = "\\"
        elif found[0] == self._quote:
            self._end_string()
        else:
            self._read_odd(found[0])
        return found.end()

    def _read_odd(self, character: str) -> None:
        """Parse a character of `_odd` that is neither the quote nor a backslash."""
        self._pass(character)

    def _wait(self, text: str, at: int) -> int:
        """Read on after a tag, up to the first quote and the character that follows it."""
        if self._closes:
            if text[at] not in BLANKS:
                self._decide(closed=text[at] in self._may_follow())
                return at
            self._waiting.append(text[at])
            return at + 1
        if self._escape:
            self._escape = ""
            self._waiting.append(text[at])
            return at + 1
        found = QUOTE_OR_ESCAPE[self._quote].search(text, at)
        end = len(text) if found is None else found.end()
        self._waiting.append(text[at:end])
        if found is not None:
            self._closes = found[0] == self._quote
            self._escape = "" if self._closes else "\\"
        return end

    def _decide(self, *, closed: bool) -> None:
        """Read the waiting text as part of the string if that is closed; else end the string before the tag."""
        text = "".join(self._waiting)
        self._waiting.clear()
        self._escape, self._closes = "", False
        if closed:
            self._search = MarkerSearch()
            self.feed(text)
            return
        self._drop_closing_brackets()
        self._end_string()
        self.broken, self.left = True, text

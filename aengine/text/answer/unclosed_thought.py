"""Finds calls in a thought; they count if the thought never ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.formats.base import CallFormat, Tools

_WORDS_AND_BLANKS = re.compile(r"\s+|\S+")


class BareCallSearch:
    """Finds calls without a marker at the end of a thought.

    They may begin at the thought's beginning, or on a new line. The text from there on is held back. If other text
    follows the calls, the search continues at the latest such place in it. So no character is parsed more than twice.
    Each piece of text except the last must end with a character that is not a blank.
    """

    __slots__ = ("_at_beginning", "_bare", "_held", "_latest", "_make", "_parser", "deltas")

    def __init__(self, bare: Collection[str], make: Callable[[], ToolCallParser]) -> None:
        """bare: the characters with any of which calls begin. make: returns a parser of calls."""
        self._bare = bare
        self._make = make
        self._at_beginning = True
        self._held: list[str] = []
        self._latest = 0  # index in `_held` of the latest piece at which calls may begin; 0 if that is the first
        self._parser: ToolCallParser | None = None  # parses the text that is held back
        self.deltas: list[Delta] = []  # of the calls in that text

    def feed(self, text: str) -> str:
        """Parse more text. Returns the part that certainly belongs to no call."""
        first, *others = self._cut(text)
        passed = [self._read(first)]
        for piece in others:
            if self._parser is None:
                self._parser = self._make()
            else:
                self._latest = len(self._held)
            passed.append(self._read(piece))
        return "".join(passed)

    def finish(self) -> tuple[str, ToolCallParser | None]:
        """End the text. Returns the rest that belongs to no calls, and the parser of the calls if there are any."""
        text = ""
        while self._parser is not None and not self._parser.complete:
            text += self._retry()
        return text, self._parser

    def flush(self) -> str:
        """Return the text that was held back."""
        return "".join(self._held)

    def _cut(self, text: str) -> Iterator[str]:
        """Cut the text before each place where calls may begin."""
        begin = end = 0
        on_new_line = self._at_beginning
        for found in _WORDS_AND_BLANKS.finditer(text):
            if found[0].isspace():
                on_new_line = on_new_line or "\n" in found[0]
                continue
            if on_new_line and found[0][0] in self._bare:
                yield text[begin:end]
                begin = end
            on_new_line, end = False, found.end()
            self._at_beginning = False
        yield text[begin:]

    def _read(self, text: str) -> str:
        """Parse text if calls may have begun. Returns the part that belongs to no call."""
        if self._parser is None:
            return text
        self._held.append(text)
        self.deltas += self._parser.feed(text)
        return "" if self._parser.sound else self._retry()

    def _retry(self) -> str:
        """Begin again at the latest place where calls may begin. Returns the text before it, or all of it."""
        held, latest = self._held, self._latest
        self._held, self._latest, self.deltas, self._parser = [], 0, [], None
        if not latest:
            return "".join(held)
        self._parser = self._make()
        return "".join(held[:latest]) + self._read("".join(held[latest:]))


class UnclosedThought:
    """Finds calls in a thought. From the first call on, `feed` holds the text back until the thought ends.

    If the model closes the thought, the calls were only part of it. Calls without a marker count only if nothing
    follows them. Time is linear in the text.
    """

    __slots__ = ("_found", "_tail", "_waiting", "calls")

    def __init__(self, form: CallFormat, tools: Tools, parallel: bool = True) -> None:
        self.calls = ToolCallParser(form, tools, parallel, bare=False)
        bare = {text[0] for text in form.syntax.bare_beginnings(tools)}
        self._tail = BareCallSearch(bare, lambda: ToolCallParser(form, tools, parallel))
        self._waiting: list[str] = []
        self._found: list[Delta] = []  # deltas of the waiting text, once it has a call

    def feed(self, text: str) -> list[Delta]:
        """Parse more of the thought. Returns the part that is certainly no call."""
        self._waiting.append(text)
        deltas = self.calls.feed(text)
        if self.calls.calls:
            self._found += deltas
            return []
        passed = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        if not passed:
            return []
        self._waiting = ["".join(self._waiting)[len(passed) :]]
        return _reasoning(self._tail.feed(passed))

    def close(self) -> list[Delta]:
        """End a thought that has closed. Returns the text that waited."""
        return _reasoning(self._tail.flush() + "".join(self._waiting))

    def finish(self, cut: bool) -> list[Delta]:
        """End the text, in which the thought has not closed. cut: the model would have continued."""
        if cut:
            return self.close()
        found = self._found + self.calls.finish()
        if self.calls.calls:
            return _reasoning(self._tail.flush()) + [
                ReasoningDelta(delta.text) if isinstance(delta, ContentDelta) else delta for delta in found
            ]
        text = self._tail.feed("".join(self._waiting))
        rest, calls = self._tail.finish()
        if calls is not None:
            self.calls = calls
        return _reasoning(text + rest) + self._tail.deltas


def _reasoning(text: str) -> list[Delta]:
    return [ReasoningDelta(text)] if text else []

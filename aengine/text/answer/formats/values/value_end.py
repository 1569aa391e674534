"""Finds the end of a value that is written as it is, between tags."""

from __future__ import annotations

from aengine.text.answer.marker_search import MarkerSearch


class ValueEnd:
    """Lets a value's text through, up to its closing tag.

    Other tags may be text of the value. From the first one on the text waits, since the closing tag may be missing:
    then that tag is the value's end. `opening` begins another value, whose closing tag is not this one's.
    """

    __slots__ = ("_closing", "_depth", "_opening", "_search", "_settled", "_waiting", "closed")

    def __init__(self, closing: str, opening: str, outer: tuple[str, ...], settled: bool) -> None:
        """settled: the first tag is the value's end."""
        self.closed = False  # by its own tag
        self._closing = closing
        self._opening = opening
        self._settled = settled
        self._depth = 0  # of values that have been opened within this one
        self._search = MarkerSearch(closing, opening, *outer)
        self._waiting: list[str] = []

    def feed(self, text: str) -> tuple[str, str | None]:
        """The part of the value that is certain, and the text behind its end; None while that has not come."""
        parts: list[str] = []
        while True:
            before, rest = self._search.feed(text)
            (self._waiting if self._waiting else parts).append(before)
            if rest is None:
                return "".join(parts), None
            tag = self._search.found
            if tag == self._closing and not self._depth:
                self.closed = True
                return "".join([*parts, *self._waiting]), rest
            if self._settled:
                return "".join(parts), tag + rest
            self._depth += (tag == self._opening) - (tag == self._closing)
            self._waiting.append(tag)
            text = rest

    def settle(self) -> str:
        """Let the first tag be the value's end: the text that waited, from that tag on."""
        self._settled, self._depth = True, 0
        if not self._waiting:
            return ""
        waited = "".join(self._waiting) + self._search.flush()
        self._waiting.clear()
        return waited

    def flush(self) -> str:
        """The text that was held back; no tag came of it."""
        return self._search.flush()

"""Parses calls that write each value without quotes between its own tags."""

from __future__ import annotations

import json

from aengine.text.answer.formats.base import Tools
from aengine.text.answer.formats.partial_call import PartialCall
from aengine.text.answer.formats.values.raw_text import RawText
from aengine.text.answer.formats.values.schemas import EVERYTHING, Kind, alternatives, kinds_of, parameters_of
from aengine.text.answer.marker_search import MarkerSearch


class ValueEnd:
    """Passes a value's text on up to its closing tag.

    Other tags may be text of the value. From the first one on, the text waits: if the closing tag is missing, that tag
    is the value's end. `opening` begins another value, which has its own closing tag.
    """

    __slots__ = ("_closing", "_depth", "_opening", "_search", "_settled", "_waiting", "closed")

    def __init__(self, closing: str, opening: str, outer: tuple[str, ...], settled: bool) -> None:
        """settled: the first tag is the value's end."""
        self.closed = False  # whether its own tag closed the value
        self._closing = closing
        self._opening = opening
        self._settled = settled
        self._depth = 0  # how many values have been opened within this one
        self._search = MarkerSearch(closing, opening, *outer)
        self._waiting: list[str] = []

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the certain part of the value, and the text after its end; None while the end has not come."""
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
        """Make the first tag the value's end. Returns the text that waited, from that tag on."""
        self._settled, self._depth = True, 0
        if not self._waiting:
            return ""
        waited = "".join(self._waiting) + self._search.flush()
        self._waiting.clear()
        return waited

    def flush(self) -> str:
        """Return the text that was held back; it became no tag."""
        return self._search.flush()


class TaggedCall(PartialCall):
    """Parses the values of a call, which has begun with its name. A format finds the name and the keys."""

    __slots__ = ("_end", "_keys", "_kinds", "_settled", "_tags", "_tools", "_trimmed", "_value")

    def __init__(self, tools: Tools, closing: str, opening: str, outer: tuple[str, ...], *, trimmed: bool) -> None:
        """closing, opening: a value's tags. outer: the other tags. trimmed: drop the line breaks around a value."""
        super().__init__()
        self._tools = tools
        self._tags = (closing, opening, outer)
        self._trimmed = trimmed
        self._kinds: dict[str, frozenset[Kind]] = {}  # of the declared parameters
        self._keys = 0
        self._settled = False
        self._value: RawText | None = None  # the value that is being read
        self._end = ValueEnd(*self._tags, self._settled)  # finds its end

    @property
    def begun(self) -> bool:
        return self.name is not None

    def _begin_call(self, name: str) -> None:
        """Begin the call of this tool."""
        self.name = name
        self._arguments.append("{")
        declared = parameters_of(self._tools[name])
        self._kinds = {key: kinds_of(alternatives(schema)) for key, schema, _ in declared}

    def _begin_value(self, key: str) -> None:
        self._value = RawText(self._kinds.get(key, EVERYTHING), trimmed=self._trimmed)
        self._end = ValueEnd(*self._tags, self._settled)
        self._arguments.append(f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: ")
        self._keys += 1

    def _read_value(self, value: RawText, text: str, at: int) -> int:
        """Parse more of the current value. At its end there is no current value."""
        before, rest = self._end.feed(text[at:])
        self._arguments.append(value.feed(before))
        if rest is None:
            return len(text)
        self._end_value(value)
        return len(text) - len(rest)

    def _end_value(self, value: RawText) -> None:
        self._arguments.append(value.finish(self._end.closed))
        self._value = None

    def settle(self) -> str:
        self._settled = True
        return "" if self._value is None else self._end.settle()

    def _close(self) -> None:
        if self._value is not None:
            self._arguments.append(self._value.feed(self._end.flush()))
            self._end_value(self._value)
        self._arguments.append("}")

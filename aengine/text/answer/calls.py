"""Parses calls of tools within the text that a model writes, as it comes."""

from __future__ import annotations

from typing import Literal

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta
from aengine.text.answer.formats.base import CallFormat, Tools
from aengine.text.answer.marker_search import MarkerSearch


class ToolCallParser:
    """Turns text into content and calls of `tools`, without `parallel` into one call at most.

    What looks like a call but is none by the time its arguments begin is content, to the last character; later
    mistakes are handed on within the arguments, which have been emitted by then. Blanks around calls are dropped.
    The result does not depend on how the text is cut, and time is linear in it.
    """

    __slots__ = (
        "_after_call",
        "_blanks",
        "_edge",
        "_emits_call",
        "_form",
        "_has_content",
        "_marker",
        "_parallel",
        "_reader",
        "_search",
        "_state",
        "_syntax",
        "_tools",
        "calls",
    )

    def __init__(self, form: CallFormat, tools: Tools, parallel: bool = True) -> None:
        self._form = form
        self._syntax = form.syntax
        self._tools = tools
        self._parallel = parallel
        self.calls = 0
        self._state: Literal["text", "call", "behind call"] = "text"
        self._search = MarkerSearch(form.syntax.begin)
        self._blanks: list[str] = []  # belong to no call and are not known to be content
        self._has_content = False  # there has been content
        self._after_call = False  # and none since the last call
        self._reader = form.reader(tools, first=True)
        self._marker = ""  # in front of the call that is being read
        self._emits_call = False  # that call
        self._edge = ""  # the beginning of what ends or follows a call

    def feed(self, text: str) -> list[Delta]:
        """Parse more text: the pieces that are complete now."""
        deltas: list[Delta] = []
        while text:
            if self._state == "text":
                text = self._read_text(text, deltas)
            elif self._state == "call":
                text = self._read_call(text, deltas)
            else:
                text = self._read_behind(text)
        return deltas

    def finish(self) -> list[Delta]:
        """Parse the end of the text: the pieces that were held back."""
        deltas: list[Delta] = []
        if self._state == "call" and not self._reader.begun:
            self._emit_content(self._marker + "".join(self._reader.raw), deltas)
        self._emit_content(self._edge + self._search.flush(), deltas)
        if self._blanks and not self._after_call:
            deltas.append(ContentDelta("".join(self._blanks)))
        return deltas

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        if self._syntax.bare and not self._has_content and not self._search.held:
            begun = text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            text = begun
            if text and text[0] == self._syntax.bare:
                self._begin_call("", first=True)
                return text
        before, rest = self._search.feed(text)
        self._emit_content(before, deltas)
        if rest is None:
            return ""
        self._begin_call(self._syntax.begin, first=True)
        return rest

    def _begin_call(self, marker: str, *, first: bool) -> None:
        self._state = "call"
        self._reader = self._form.reader(self._tools, first)
        self._marker = marker
        self._emits_call = False

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        reader = self._reader
        had_begun = reader.begun
        taken = reader.feed(text)
        if reader.begun and not had_begun:
            self._blanks.clear()
            self._after_call = True
            self._emits_call = self._parallel or not self.calls
            if self._emits_call:
                deltas.append(CallDelta(self.calls, "", reader.id or self._form.new_id(), reader.name))
                self.calls += 1
        arguments = reader.take_arguments()
        if arguments and self._emits_call:
            deltas.append(CallDelta(self.calls - 1, arguments))
        if reader.begun and (reader.done or reader.broken):
            self._state = "behind call"
        elif reader.broken:
            self._state = "text"
            self._emit_content(self._marker + "".join(reader.raw), deltas)
        return text[taken:]

    def _read_behind(self, text: str) -> str:
        """Skip the end of the group, or go on to its next call."""
        end, further = self._syntax.end, self._syntax.further
        text, self._edge = self._edge + text, ""
        rest = text.lstrip(self._syntax.noise)
        self._blanks.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        if end.startswith(rest) and rest != end:
            self._edge = rest
            return ""
        if rest[0] in further and not (end and rest.startswith(end)):
            self._begin_call("", first=False)
            return rest
        self._state = "text"
        if not end or not rest.startswith(end):
            return rest
        self._blanks.clear()
        return rest[len(end) :]

    def _emit_content(self, text: str, deltas: list[Delta]) -> None:
        """Append content, but hold back blanks at its end until something follows them."""
        kept = text.rstrip()
        if kept:
            content = "".join(self._blanks) + kept
            if self._after_call and not self._has_content:
                content = content.lstrip()
            deltas.append(ContentDelta(content))
            self._blanks.clear()
            self._has_content, self._after_call = True, False
        if len(kept) < len(text):
            self._blanks.append(text[len(kept) :])

"""Parses calls of tools within the text that a model writes, as it comes."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta
from aengine.text.answer.formats.base import CallFormat, CallSyntax, Tools
from aengine.text.answer.marker_search import MarkerSearch

_BLANKS = " \t\r\n"
_NAME_CHARACTER = re.compile(r"[\w.-]")
_NAME_AT_END = re.compile(r"([\w.-]+)([ \t\r\n]{0,2})\Z")
_LONGEST = 200  # characters of a name and the blanks behind it


class CallSearch:
    """Lets the text before a call through; holds back only an end that may begin one.

    A call begins with a marker. With `lenient` one that the model wrote with another marker is found as well, or
    without any, by a marker within it, unless that is quoted in Markdown; the name before such a marker must be one
    of `names`.
    """

    __slots__ = ("_after_name", "_last", "_names", "_search", "_unmarked", "_word", "marker")

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, lenient: bool) -> None:
        self._unmarked = syntax.unmarked if lenient else ""
        self._after_name = syntax.after_name if lenient else ""
        others = syntax.begins if lenient else ()
        self._search = MarkerSearch(syntax.begin, *others, self._unmarked, self._after_name)
        self._names = names
        self._word = ""  # held back: a name that a marker may follow, or the beginning of one
        self._last = ""  # the character before it
        self.marker = ""  # before the call that was found; empty: the model left it out

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._word or self._search.held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text before a call, as far as that is certain, and the call's text behind `marker`; None while no call
        is found.
        """
        passed = ""
        while True:
            before, rest = self._search.feed(text)
            before, self._word = self._word + before, ""
            if rest is None:
                at = self._name_at_end(before)
                self._word = before[at:]
                return passed + self._pass(before[:at]), None
            self.marker = self._search.found
            if self.marker == self._after_name:
                at = self._name_at_end(before, whole=True)
                name, before = before[at:], before[:at]
                if name:
                    self.marker, rest = "", name + self._after_name + rest
                else:
                    passed += self._pass(before + self.marker)
                    text = rest
                    continue
            elif self.marker == self._unmarked:
                if (before or self._last).endswith("`"):  # a quotation in Markdown
                    passed += self._pass(before + self.marker)
                    text = rest
                    continue
                self.marker, rest = "", self._unmarked + rest
            return passed + self._pass(before), rest

    def flush(self) -> str:
        """The text that was held back; no call came of it."""
        held, self._word = self._word + self._search.flush(), ""
        return held

    def _pass(self, text: str) -> str:
        self._last = text[-1:] or self._last
        return text

    def _name_at_end(self, text: str, *, whole: bool = False) -> int:
        """The place of a tool's name at the end of the text, or unless `whole` of its beginning; the end for none."""
        none = len(text)
        if not self._after_name or (found := _NAME_AT_END.search(text, max(0, none - _LONGEST))) is None:
            return none
        at = found.start()
        if _NAME_CHARACTER.match(text[at - 1 : at] if at else self._last):
            return none
        word, blanks = found.groups()
        if word in self._names:
            return at
        begins = not whole and not blanks and not self._search.held
        return at if begins and any(name.startswith(word) for name in self._names) else none


class ToolCallParser:
    """Turns text into content and calls of `tools`, without `parallel` into one call at most.

    What looks like a call but is none by the time its arguments begin is content, to the last character; from then on
    it is a call whose arguments are JSON, whatever else is written there. Blanks around calls are dropped. The result
    does not depend on how the text is cut, and time is linear in it.

    lenient: calls without the marker before them are read as well, if what is in them leaves no doubt. forced: there is
    nothing but calls. bare: a format that knows calls without a marker may begin the text with them.
    """

    __slots__ = (
        "_after_call",
        "_bare",
        "_blanks",
        "_broken",
        "_edge",
        "_emits_call",
        "_ends",
        "_ends_expected",
        "_forced",
        "_form",
        "_has_content",
        "_leaves_no_doubt",
        "_marker",
        "_parallel",
        "_reader",
        "_search",
        "_settled",
        "_started",
        "_state",
        "_syntax",
        "_tools",
        "calls",
        "cut",
    )

    def __init__(
        self,
        form: CallFormat,
        tools: Tools,
        parallel: bool = True,
        *,
        lenient: bool = True,
        forced: bool = False,
        bare: bool = True,
    ) -> None:
        self._form = form
        self._syntax = form.syntax
        self._bare = form.syntax.bare if bare else ""
        self._tools = tools
        self._parallel = parallel
        self._forced = forced
        self.calls = 0
        self.cut = False  # the last call's arguments are cut short
        self._state: Literal["text", "call", "behind call"] = "text"
        self._search = CallSearch(form.syntax, tools.keys(), lenient=lenient)
        self._blanks: list[str] = []  # belong to no call and are not known to be content
        self._has_content = False  # there has been content
        self._after_call = False  # and none since the last call
        self._broken = False  # a call has ended with what belongs to none
        self._reader = form.reader(tools, first=True)
        self._leaves_no_doubt = False  # a marker tells that it is one
        self._marker = ""  # in front of the call that is being read
        self._started = False  # the reader's text is a call
        self._emits_call = False  # that call
        self._ends: tuple[str, ...] = ()  # the texts that may still end the group, in their order
        self._ends_expected = 0  # how many of them there were before the group's first call
        self._edge = ""  # the beginning of what ends or follows a call
        self._settled = False  # values without a closing tag end with the first tag

    @property
    def sound(self) -> bool:
        """Whether there is nothing in the text but calls as the format has them, the last one perhaps not complete."""
        return not self._has_content and not self._broken

    @property
    def complete(self) -> bool:
        """Whether the text is sound and its last call is complete."""
        return self.sound and self.calls > 0 and self._state == ("text" if self._syntax.end else "behind call")

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

    def finish(self, cut: bool = False) -> list[Delta]:
        """Parse the end of the text: the pieces that were held back.

        cut: the model would have gone on. Then a call that has begun stays as it is, and the beginning of one is no
        text.
        """
        deltas: list[Delta] = []
        if self._state == "call" and not cut:
            self._settled = True
            while waited := self._reader.settle():
                deltas += self.feed(waited)
        if self._state == "call":
            self._finish_call(cut, deltas)
        if not (cut and self._forced):
            self._emit_content(("" if cut else self._edge) + self._search.flush(), deltas)
            if self._blanks and not self._after_call:
                deltas.append(ContentDelta("".join(self._blanks)))
        return deltas

    def _finish_call(self, cut: bool, deltas: list[Delta]) -> None:
        reader = self._reader
        if not cut:
            reader.close()
            self._emit_call(deltas)
        self.cut = cut and reader.begun and self._emits_call
        if not reader.begun and not (cut and (self._forced or self._leaves_no_doubt)):
            self._emit_content(self._marker + "".join(reader.raw), deltas)

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        if self._bare and not self._has_content and not self._search.holds:
            begun = text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            text = begun
            if text and text[0] == self._bare:
                self._begin_call("", first=True)
                self._leaves_no_doubt = False
                return text
        before, rest = self._search.feed(text)
        self._emit_content(before, deltas)
        if rest is None:
            return ""
        self._begin_call(self._search.marker, first=True)
        return rest

    def _begin_call(self, marker: str, *, first: bool) -> None:
        self._state = "call"
        self._reader = self._form.reader(self._tools, first)
        if self._settled:
            self._reader.settle()
        self._marker = marker
        if first:
            self._ends = tuple(filter(None, (self._syntax.end, self._syntax.begins.get(marker))))
            self._ends_expected = len(self._ends)
        self._leaves_no_doubt = True
        self._started = self._emits_call = False

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        reader = self._reader
        taken = reader.feed(text)
        self._emit_call(deltas)
        if reader.begun and (reader.done or reader.broken):
            self._state = "behind call"
            self._broken = self._broken or not reader.done
        elif reader.broken:
            self._state = "text"
            self._emit_content(self._marker + "".join(reader.raw), deltas)
        return reader.left + text[taken:]

    def _emit_call(self, deltas: list[Delta]) -> None:
        """Append what is new of the call that is being read, once it is one."""
        reader = self._reader
        if reader.begun and not self._started:
            self._started = True
            self._blanks.clear()
            self._after_call = True
            self._emits_call = self._parallel or not self.calls
            if self._emits_call:
                deltas.append(CallDelta(self.calls, "", reader.id or self._form.new_id(), reader.name))
                self.calls += 1
        arguments = reader.take_arguments()
        if arguments and self._emits_call:
            deltas.append(CallDelta(self.calls - 1, arguments))

    def _read_behind(self, text: str) -> str:
        """Skip the end of the group, or go on to its next call."""
        ends, closed = self._ends, len(self._ends) < self._ends_expected
        text, self._edge = self._edge + text, ""
        rest = text.lstrip(_BLANKS if closed else self._syntax.noise)
        self._blanks.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        for index, end in enumerate(ends):
            if rest.startswith(end):
                self._blanks.clear()
                self._ends = ends[index + 1 :]
                self._state = "behind call" if self._ends else "text"
                return rest[len(end) :]
            if end.startswith(rest):
                self._edge = rest
                return ""
        if rest[0] in self._syntax.further and not closed:
            self._begin_call("", first=False)
        else:
            self._state = "text"
        return rest

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

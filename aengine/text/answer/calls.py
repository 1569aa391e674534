"""Parses calls of tools in the text that a model writes, while it comes."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta
from aengine.text.answer.formats.base import BLANKS, CallFormat, CallSyntax, Tools
from aengine.text.answer.marker_search import MarkerSearch

_NAME_CHARACTER = re.compile(r"[\w.-]")
_NAME_AT_END = re.compile(r"([\w.-]+)([ \t\r\n]{0,2})\Z")
_LONGEST = 200  # characters of a name and the blanks after it


class CallSearch:
    """Finds the beginning of a call. Passes the text before it on, and holds back only an end that may begin a call.

    A call begins with a marker. If `lenient`, another marker in its place counts as well. If the model left it out, a
    marker within the call shows that there is one. A marker quoted in Markdown begins no call. A name before the inner
    marker must be one of `names`.
    """

    __slots__ = ("_after_name", "_last", "_names", "_search", "_unmarked", "_word", "marker")

    def __init__(self, syntax: CallSyntax, names: Collection[str], *, lenient: bool) -> None:
        self._unmarked = syntax.unmarked if lenient else ""
        self._after_name = syntax.after_name if lenient else ""
        others = syntax.begins if lenient else ()
        self._search = MarkerSearch(syntax.begin, *others, self._unmarked, self._after_name)
        self._names = names
        self._word = ""  # text that is held back: a name that a marker may follow, or the beginning of a name
        self._last = ""  # the character before `_word`
        self.marker = ""  # the marker before the call that was found; empty if the model left it out

    @property
    def holds(self) -> bool:
        """Whether text is held back."""
        return bool(self._word or self._search.held)

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the certain part of the text before a call, and the call's text after `marker`.

        The call's text is None while no call is found.
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

    def flush(self, cut: bool) -> str:
        """Return the text that was held back; it began no call.

        cut: the model would have continued. Then three or more characters of a marker are dropped, with the tool's name
        before them if the marker follows a name. Fewer are text.
        """
        begun = self._search.flush()
        name, self._word = self._word, ""
        if not cut or len(begun) < 3:
            return name + begun
        return "" if self._after_name.startswith(begun) else name

    def _pass(self, text: str) -> str:
        self._last = text[-1:] or self._last
        return text

    def _name_at_end(self, text: str, *, whole: bool = False) -> int:
        """Return where a tool's name at the end of the text begins; the text's length if there is none.

        Without `whole`, the beginning of a name counts as well.
        """
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
    """Separates text into content and calls of `tools`: one call at most unless `parallel`.

    Text that looks like a call, but turns out to be none before its arguments begin, is content as it stands. Once its
    arguments have begun, it is a call, and they become valid JSON whatever the model writes. Blanks around calls are
    dropped.
    The result does not depend on how the text is cut, and time is linear in it.

    lenient: also read calls without the marker before them, if a marker within them proves that they are calls. forced:
    the answer is only calls. bare: if the format has calls without a marker, the text may begin with them.
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
        "_is_certain",
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
        self._bare = {text[0] for text in form.syntax.bare_beginnings(tools)} if bare else set()
        self._tools = tools
        self._parallel = parallel
        self._forced = forced
        self.calls = 0
        self.cut = False  # whether the last call's arguments are cut off
        self._state: Literal["text", "call", "after call"] = "text"
        self._search = CallSearch(form.syntax, tools.keys(), lenient=lenient)
        self._blanks: list[str] = []  # blanks outside calls that may be content or not
        self._has_content = False  # whether there has been content
        self._after_call = False  # whether no content has come since the last call
        self._broken = False  # whether a call was followed by text that cannot be part of it
        self._reader = form.reader(tools, first=True)
        self._is_certain = False  # whether a marker proves that this is a call
        self._marker = ""  # the marker before the call that is being read
        self._started = False  # whether the reader's text is a call
        self._emits_call = False  # whether that call is reported
        self._ends: tuple[str, ...] = ()  # the texts that may still end the group, in their order
        self._ends_expected = 0  # how many of them there were before the group's first call
        self._edge = ""  # text that may become an end of the group
        self._settled = False  # whether values without a closing tag end with the first tag

    @property
    def sound(self) -> bool:
        """Whether the text is nothing but calls in this format. The last one need not be complete."""
        return not self._has_content and not self._broken

    @property
    def complete(self) -> bool:
        """Whether the text is sound and its last call is complete."""
        return self.sound and self.calls > 0 and self._state == ("text" if self._syntax.end else "after call")

    def feed(self, text: str) -> list[Delta]:
        """Parse more text. Returns the deltas that are complete now."""
        deltas: list[Delta] = []
        while text:
            if self._state == "text":
                text = self._read_text(text, deltas)
            elif self._state == "call":
                text = self._read_call(text, deltas)
            else:
                text = self._read_after_call(text)
        return deltas

    def finish(self, cut: bool = False) -> list[Delta]:
        """Parse the end of the text. Returns the deltas that were held back.

        cut: the model would have continued. Then a call that has begun stays as it is, and the beginning of a call is
        dropped.
        """
        deltas: list[Delta] = []
        if self._state == "call" and not cut:
            self._settled = True
            while waited := self._reader.settle():
                deltas += self.feed(waited)
        if self._state == "call":
            self._finish_call(cut, deltas)
        if not (cut and self._forced):
            self._emit_content(("" if cut else self._edge) + self._search.flush(cut), deltas)
            if (blanks := "".join(self._blanks)) and not self._after_call:
                deltas.append(ContentDelta(blanks))
        return deltas

    def _finish_call(self, cut: bool, deltas: list[Delta]) -> None:
        reader = self._reader
        if not cut:
            reader.close()
            self._emit_call(deltas)
        self.cut = cut and reader.begun and self._emits_call
        if not reader.begun and not (cut and (self._forced or self._is_certain or self._begins_bare_call())):
            self._emit_content(self._marker + "".join(reader.raw), deltas)

    def _begins_bare_call(self) -> bool:
        """Whether the text of a call without a marker is that of a call as far as it goes."""
        text = "".join("".join(self._reader.raw).split())
        return self._reader.name is not None or any(
            f"{self._syntax.before_name}{name}".startswith(text) for name in self._tools
        )

    def _read_text(self, text: str, deltas: list[Delta]) -> str:
        if self._bare and not self._has_content and not self._search.holds:
            begun = text.lstrip()
            self._blanks.append(text[: len(text) - len(begun)])
            text = begun
            if text and text[0] in self._bare:
                self._begin_call("", first=True)
                self._is_certain = False
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
        self._is_certain = True
        self._started = self._emits_call = False

    def _read_call(self, text: str, deltas: list[Delta]) -> str:
        reader = self._reader
        taken = reader.feed(text)
        self._emit_call(deltas)
        if reader.begun and (reader.done or reader.broken):
            self._state = "after call"
            self._broken = self._broken or not reader.done
        elif reader.broken:
            self._state = "text"
            self._emit_content(self._marker + "".join(reader.raw), deltas)
        return reader.left + text[taken:]

    def _emit_call(self, deltas: list[Delta]) -> None:
        """Append the new parts of the current call to `deltas`, if it has begun."""
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

    def _read_after_call(self, text: str) -> str:
        """Skip the end of the group, or go on to its next call."""
        ends, closed = self._ends, len(self._ends) < self._ends_expected
        text, self._edge = self._edge + text, ""
        rest = text.lstrip(BLANKS if closed else self._syntax.noise)
        self._blanks.append(text[: len(text) - len(rest)])
        if not rest:
            return ""
        for index, end in enumerate(ends):
            if rest.startswith(end):
                self._blanks.clear()
                self._ends = ends[index + 1 :]
                self._state = "after call" if self._ends else "text"
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
        """Append content to `deltas`, but hold back blanks at its end until more content follows."""
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

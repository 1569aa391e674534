"""Finds the beginning of a call in the text of an answer that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Collection

from aengine.text.answer.formats.base import CallSyntax
from aengine.text.answer.marker_search import MarkerSearch

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

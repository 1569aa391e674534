"""Finds the first of some markers in a text that comes in pieces."""

from __future__ import annotations

import functools
import re


@functools.lru_cache(64)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


class MarkerSearch:
    """Passes the text before a marker on, and holds back only an end that may become a marker.

    Empty markers are never found. No marker may be a prefix of another one.
    """

    __slots__ = ("_firsts", "_longest", "_markers", "found", "held")

    def __init__(self, *markers: str) -> None:
        self._markers = tuple(filter(None, markers))
        self._firsts = frozenset(marker[0] for marker in self._markers)
        self._longest = max(map(len, self._markers), default=0)
        self.held = ""
        self.found = ""  # the last marker that was found

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the certain part of the text before a marker, and the text after it; None while none is found.

        After a marker the search begins anew.
        """
        text, self.held = self.held + text, ""
        if not self._markers:
            return text, None
        found, shown = _pattern(self._markers).search(text), self._certain(text)
        if found is not None and found.start() <= shown:  # otherwise it may be a part of a marker that began before it
            self.found = found[0]
            return text[: found.start()], text[found.end() :]
        text, self.held = text[:shown], text[shown:]
        return text, None

    def flush(self) -> str:
        """Return the text that was held back; it became no marker."""
        held, self.held = self.held, ""
        return held

    def _certain(self, text: str) -> int:
        """Return the place in the text after which a marker may begin."""
        for at in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts and any(marker.startswith(text[at:]) for marker in self._markers):
                return at
        return len(text)

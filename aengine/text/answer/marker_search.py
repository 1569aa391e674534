"""Finds a marker in a text that comes in pieces."""

from __future__ import annotations


class MarkerSearch:
    """Lets the text before a marker through; holds back only an end that may become the marker.

    An empty marker is never found.
    """

    __slots__ = ("_marker", "held")

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text before the marker, as far as that is certain, and the text behind it; None while it is not found.

        Once the marker is found the search begins anew.
        """
        text, self.held = self.held + text, ""
        if not self._marker:
            return text, None
        at = text.find(self._marker)
        if at >= 0:
            return text[:at], text[at + len(self._marker) :]
        if self._marker[0] in text[1 - len(self._marker) :]:
            shown = len(text) - self._overlap(text)
            text, self.held = text[:shown], text[shown:]
        return text, None

    def flush(self) -> str:
        """The text that was held back; no marker came of it."""
        held, self.held = self.held, ""
        return held

    def _overlap(self, text: str) -> int:
        """The number of characters at the end of the text that may begin the marker."""
        longest = min(len(self._marker) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if text.endswith(self._marker[:n])), 0)

"""Looks for calls in a thought, which count if the thought never ends."""

from __future__ import annotations

from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta


class UnclosedThought:
    """Passes a thought on up to the first call in it. From there on the text waits for the thought's end.

    If that comes, the model has only thought of the calls. Time is linear in the text.
    """

    __slots__ = ("_found", "_waiting", "calls")

    def __init__(self, calls: ToolCallParser) -> None:
        self.calls = calls
        self._waiting: list[str] = []
        self._found: list[Delta] = []  # what waits, parsed, since a call has begun in it

    def feed(self, text: str) -> list[Delta]:
        """Parse more of the thought: the part that is no call, as far as that is certain."""
        self._waiting.append(text)
        deltas = self.calls.feed(text)
        if self.calls.calls:
            self._found += deltas
            return []
        passed = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        if not passed:
            return []
        self._waiting = ["".join(self._waiting)[len(passed) :]]
        return [ReasoningDelta(passed)]

    def close(self) -> list[Delta]:
        """End the thought, which has closed: the text that waited."""
        text = "".join(self._waiting)
        return [ReasoningDelta(text)] if text else []

    def finish(self, cut: bool) -> list[Delta]:
        """End the text, in which the thought has not closed. cut: the model would have gone on."""
        if cut:
            return self.close()
        found = self._found + self.calls.finish()
        if not self.calls.calls:
            return self.close()
        return [ReasoningDelta(delta.text) if isinstance(delta, ContentDelta) else delta for delta in found]

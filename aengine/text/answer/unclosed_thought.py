"""Looks for calls in a thought, which count if the thought never ends."""

from __future__ import annotations

from aengine.text.answer.bare_tail import BareTail
from aengine.text.answer.calls import ToolCallParser
from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.formats.base import CallFormat, Tools


class UnclosedThought:
    """Passes a thought on up to the first call in it. From there on the text waits for the thought's end.

    If that comes, the model has only thought of the calls. Calls without a marker count if nothing follows them. Time
    is linear in the text.
    """

    __slots__ = ("_found", "_tail", "_waiting", "calls")

    def __init__(self, form: CallFormat, tools: Tools, parallel: bool = True) -> None:
        self.calls = ToolCallParser(form, tools, parallel, bare=False)
        self._tail = BareTail(form.syntax.bare, lambda: ToolCallParser(form, tools, parallel))
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
        return _reasoning(self._tail.feed(passed))

    def close(self) -> list[Delta]:
        """End the thought, which has closed: the text that waited."""
        return _reasoning(self._tail.flush() + "".join(self._waiting))

    def finish(self, cut: bool) -> list[Delta]:
        """End the text, in which the thought has not closed. cut: the model would have gone on."""
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

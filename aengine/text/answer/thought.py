"""The thought that a model writes between `<think>` and `</think>` before it answers."""

from __future__ import annotations

from typing import Literal

from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.marker_search import MarkerSearch

THOUGHT_BEGIN = "<think>"
THOUGHT_END = "</think>"


class ThoughtParser:
    """Tells the thought at the start of an answer from what follows. Line breaks around the thought are dropped.

    `opened`: the prompt ends within a thought already, so that only its end is still to come. The result does not
    depend on how the text is cut, and time is linear in it.
    """

    __slots__ = ("_blanks", "_breaks", "_edge", "_opened", "_search", "_state", "_told")

    def __init__(self, opened: bool = False) -> None:
        self._opened = opened
        self._state: Literal["start", "thought", "gap", "answer"] = "start"
        self._blanks: list[str] = []  # before anything else has come
        self._edge = ""  # the beginning of a marker, behind them
        self._search = MarkerSearch(THOUGHT_END)
        self._told = False  # something of the thought
        self._breaks: list[str] = []  # line breaks that are dropped if the thought ends here

    @property
    def over(self) -> bool:
        """Whether all further text is the answer's."""
        return self._state == "answer"

    def feed(self, text: str) -> list[Delta]:
        """The pieces that are complete now that `text` has come."""
        deltas: list[Delta] = []
        rest: str | None = text
        if self._state == "start" and rest:
            rest = self._begin(rest)
        if self._state == "thought" and rest:
            before, rest = self._search.feed(rest)
            self._think(before, deltas)
            if rest is not None:
                self._state = "gap"
                self._breaks.clear()
        if self._state == "gap" and rest:
            rest = rest.lstrip("\n")
            if rest:
                self._state = "answer"
        if self._state == "answer" and rest:
            deltas.append(ContentDelta(rest))
        return deltas

    def finish(self) -> list[Delta]:
        """What was held back, once no further text will come."""
        deltas: list[Delta] = []
        start = "".join(self._blanks) + self._edge
        if start and not self._opened:
            deltas.append(ContentDelta(start))
        else:
            self._think(start + self._search.flush(), deltas)
            if self._breaks:
                deltas.append(ReasoningDelta("".join(self._breaks)))
        return deltas

    def _begin(self, text: str) -> str:
        """Look for the marker at the start; what is left of the text once that is decided."""
        text = self._edge + text
        begun = text.lstrip()
        self._blanks.append(text[: len(text) - len(begun)])
        if THOUGHT_BEGIN.startswith(begun) and begun != THOUGHT_BEGIN:
            self._edge = begun
            return ""
        if begun.startswith(THOUGHT_BEGIN):  # some models repeat what the prompt ends with
            self._state, text = "thought", begun[len(THOUGHT_BEGIN) :]
        else:
            self._state = "thought" if self._opened else "answer"
            text = "".join(self._blanks) + begun
        self._blanks.clear()
        self._edge = ""
        return text

    def _think(self, text: str, deltas: list[Delta]) -> None:
        if not self._told:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            deltas.append(ReasoningDelta("".join(self._breaks) + kept))
            self._told = True
            self._breaks.clear()
        if self._told and len(kept) < len(text):
            self._breaks.append(text[len(kept) :])

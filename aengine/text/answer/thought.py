"""Parses and counts the thought that a model writes between two markers before it answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.marker_search import MarkerSearch


class ThoughtMarkers(NamedTuple):
    """The markers that a family of models writes around a thought."""

    begin: str
    end: str

    @property
    def tokens(self) -> tuple[str, str]:
        """The tokens of the markers. `<|channel>thought` begins with the token `<|channel>`."""
        return self.begin[: self.begin.rfind(">") + 1] or self.begin, self.end


THINK = ThoughtMarkers("<think>", "</think>")  # most families
MISTRAL_THINK = ThoughtMarkers("[THINK]", "[/THINK]")  # Magistral and later
SEED_THINK = ThoughtMarkers("<seed:think>", "</seed:think>")
GEMMA_THINK = ThoughtMarkers("<|channel>thought", "<channel|>")  # Gemma 4
COHERE_THINK = ThoughtMarkers("<|START_THINKING|>", "<|END_THINKING|>")  # Command R7B and A
APERTUS_THINK = ThoughtMarkers("<|inner_prefix|>", "<|inner_suffix|>")
HY3_THINK = ThoughtMarkers("<think:opensource>", "</think:opensource>")
ALL_THOUGHTS = (THINK, MISTRAL_THINK, SEED_THINK, GEMMA_THINK, COHERE_THINK, APERTUS_THINK, HY3_THINK)


def thoughts_of(templates: Iterable[str], vocabulary: Iterable[str]) -> ThoughtMarkers | None:
    """Return the markers of thoughts in the chat templates. If there are none, return those in the vocabulary."""
    text, known = "\n".join(templates), frozenset(vocabulary)
    found = [markers for markers in ALL_THOUGHTS if markers.end in text]
    tokens = [markers for markers in ALL_THOUGHTS if known.issuperset(markers.tokens)]
    return next(iter([*found, *sorted(tokens, key=lambda markers: markers.begin not in text)]), None)


class ThoughtParser:
    """Separates the thought at the start of an answer from the rest. Line breaks around the thought are dropped.

    opened: the prompt has begun the thought, so that only its end is still to come. The result does not depend on how
    the text is cut, and time is linear in it.
    """

    __slots__ = ("_blanks", "_breaks", "_edge", "_emitted", "_marker", "_opened", "_search", "_state")

    def __init__(self, opened: bool = False, markers: ThoughtMarkers = THINK) -> None:
        self._opened = opened
        self._marker = markers.begin
        self._state: Literal["start", "thought", "gap", "answer"] = "start"
        self._blanks: list[str] = []  # before any other character
        self._edge = ""  # text after the blanks that may become a marker
        self._search = MarkerSearch(markers.end)
        self._emitted = False  # whether a part of the thought has been returned
        self._breaks: list[str] = []  # line breaks that are dropped if the thought ends here

    @property
    def over(self) -> bool:
        """Whether all further text belongs to the answer."""
        return self._state == "answer"

    @property
    def closed(self) -> bool:
        """Whether there is no thought, or its end has come."""
        return self._state in ("gap", "answer")

    def feed(self, text: str) -> list[Delta]:
        """Parse more text. Returns the deltas that are complete now."""
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
        """Parse the end of the text. Returns the deltas that were held back."""
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
        """Search the start for the marker. Returns the rest of the text once that is decided."""
        text = self._edge + text
        begun = text.lstrip()
        self._blanks.append(text[: len(text) - len(begun)])
        if self._marker.startswith(begun) and begun != self._marker:
            self._edge = begun
            return ""
        if begun.startswith(self._marker):  # some models repeat the end of the prompt
            self._state, text = "thought", begun[len(self._marker) :]
        else:
            self._state = "thought" if self._opened else "answer"
            text = "".join(self._blanks) + begun
        self._blanks.clear()
        self._edge = ""
        return text

    def _think(self, text: str, deltas: list[Delta]) -> None:
        if not self._emitted:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            deltas.append(ReasoningDelta("".join(self._breaks) + kept))
            self._emitted = True
            self._breaks.clear()
        if self._emitted and len(kept) < len(text):
            self._breaks.append(text[len(kept) :])


class ThoughtTokenCounter:
    """Counts the tokens between an answer's beginning and the end of its thought, without those of the markers.

    The bytes of the tokens are searched, not the text: text comes later than its tokens. opened: the prompt has begun
    the thought.
    """

    __slots__ = ("_begin_marker", "_bytes_of", "_end_marker", "_length", "_starts", "_tail", "begun", "count", "over")

    def __init__(self, bytes_of: Callable[[int], bytes], markers: ThoughtMarkers, opened: bool) -> None:
        self._bytes_of = bytes_of
        self._begin_marker, self._end_marker = markers.begin.encode(), markers.end.encode()
        self.begun = opened  # whether there is a thought
        self._tail = b""  # bytes that may become a marker
        self._length = 0  # bytes of the thought
        self._starts: deque[int] = deque(maxlen=len(self._end_marker))  # where in these bytes the latest tokens begin
        self.count = 0
        self.over = False  # whether all further tokens belong to the answer

    @property
    def absent(self) -> bool:
        """Whether it is certain that the answer has no thought."""
        return self.over and not self.begun

    def feed(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the answer."""
        for token_id in token_ids:
            if self.over:
                return
            data = self._bytes_of(token_id)
            if self.begun:
                self._think(data)
            else:
                self._begin(data)

    def _begin(self, data: bytes) -> None:
        self._tail = (self._tail + data).lstrip()
        if self._tail.startswith(self._begin_marker):
            data, self._tail, self.begun = self._tail.removeprefix(self._begin_marker), b"", True
            if data:
                self._think(data)
        elif not self._begin_marker.startswith(self._tail):
            self.over = True

    def _think(self, data: bytes) -> None:
        self._starts.append(self._length)
        self._length += len(data)
        self.count += 1
        tail = self._tail + data
        place = tail.find(self._end_marker)
        if place >= 0:
            end = self._length - len(tail) + place
            self.count -= sum(start >= end for start in self._starts)
            self.over = True
        self._tail = tail[1 - len(self._end_marker) :]

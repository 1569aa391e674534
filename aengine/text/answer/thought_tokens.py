"""Counts the tokens of an answer that are its thought."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from aengine.text.answer.thought import ThoughtMarkers


class ThoughtTokens:
    """Counts the tokens between an answer's beginning and the end of its thought, those of the markers left out.

    Looks at the tokens' own bytes: texts come later than their tokens, and several at once. `opened`: the prompt ends
    within a thought already.
    """

    __slots__ = ("_begin_marker", "_bytes_of", "_end_marker", "_length", "_starts", "_tail", "begun", "count", "over")

    def __init__(self, bytes_of: Callable[[int], bytes], markers: ThoughtMarkers, opened: bool) -> None:
        self._bytes_of = bytes_of
        self._begin_marker, self._end_marker = markers.begin.encode(), markers.end.encode()
        self.begun = opened  # there is a thought
        self._tail = b""  # the beginning of a marker, maybe
        self._length = 0  # bytes of the thought
        self._starts: deque[int] = deque(maxlen=len(self._end_marker))  # where in them the latest tokens begin
        self.count = 0
        self.over = False  # no further token counts

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

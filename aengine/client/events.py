"""Server-sent events, read from bytes as they come."""

from __future__ import annotations

import re

from aengine.errors import ServerError

MAX_EVENT_BYTES = 64 * 2**20
_LINE_END = re.compile(rb"\r\n|\r|\n")


class EventReader:
    """Puts the `data` of events together, however the bytes are cut. Time is linear in them, memory one event's."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._line: list[bytes] = []  # pieces of the line that has not ended
        self._data: list[bytes] = []  # lines of the event that has not ended
        self._held = 0  # bytes in both
        self._after_return = False  # the last byte was \r; a \n that follows belongs to it

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes. Raises `ServerError` for one that is too long."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._after_return = False
        if chunk:
            self._after_return = chunk.endswith(b"\r")
        events: list[bytes] = []
        *ended, rest = _LINE_END.split(chunk)
        for piece in ended:
            self._hold(len(piece))
            self._end_line(b"".join((*self._line, piece)), events)
            self._line.clear()
        if rest:
            self._hold(len(rest))
            self._line.append(rest)
        return events

    def _hold(self, size: int) -> None:
        self._held += size
        if self._held > self._max_bytes:
            raise ServerError(f"the server sent an event of more than {self._max_bytes} bytes")

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
            return
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data.clear()
            self._held = 0
        else:
            self._held -= len(line)  # a comment, or a field that means nothing here

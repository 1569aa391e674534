"""Server-sent events: framing, and events encoded once around the values that change."""

from __future__ import annotations

import msgspec

encode = msgspec.json.Encoder().encode

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in between must not collect the stream
]
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment: clients skip it, a dead connection shows


def event(payload: object) -> bytes:
    """One event that carries `payload` as JSON."""
    return b"data: %b\n\n" % encode(payload)


class Template:
    """An event of which only the values marked `HOLE` differ from one to the next; the rest is encoded once."""

    HOLE = "\x00hole\x00"

    def __init__(self, payload: object) -> None:
        self._start, *self._rest = event(payload).split(encode(self.HOLE))

    def fill(self, *values: object) -> bytes:
        """The event with one value per hole, in the payload's order."""
        out = self._start
        for value, rest in zip(values, self._rest):
            out += encode(value) + rest
        return out

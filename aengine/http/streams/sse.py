"""Server-sent events: framing, and events encoded once around the values that change."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

encode = msgspec.json.Encoder().encode

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy in between must not collect the stream
]
DONE = b"data: [DONE]\n\n"
HOLE = "\x00hole\x00"
PING = b": ping\n\n"  # a comment: clients skip it, a dead connection shows


def event(payload: object) -> bytes:
    """One event that carries `payload` as JSON."""
    return b"data: %b\n\n" % encode(payload)


def typed_event(payload: Mapping[str, object]) -> bytes:
    """One event that carries `payload` as JSON, and its `type` as the event's name."""
    return b"event: %b\n%b" % (str(payload["type"]).encode(), event(payload))


def template(payload: object) -> bytes:
    """An event, encoded once, with places for the values that change: `template(...) % encode(text)`.

    Each `HOLE` in the payload takes one value, as JSON, in the payload's order.
    """
    return event(payload).replace(b"%", b"%%").replace(encode(HOLE), b"%b")


def typed_template(payload: Mapping[str, object]) -> bytes:
    """The same with the payload's `type` as the event's name."""
    return b"event: %b\n%b" % (str(payload["type"]).encode(), template(payload))

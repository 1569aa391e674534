"""Sends an answer from the ingress to its client, and ends a stream whose replica is lost."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from aengine.errors import AengineError
from aengine.http.anthropic.events import error_event
from aengine.http.entry.context import context_of, speaks_anthropic
from aengine.http.entry.errors import ErrorBody, error_body_for, error_response
from aengine.http.entry.middleware import request_id_of
from aengine.http.responses.events import failure_of
from aengine.http.streams import sse
from aengine.http.streams.sse import body_message
from aengine.ray_serve.call import Head

_REQUEST_ID = b"x-request-id"  # Ray's proxy adds the same header
_CREATED = re.compile(rb"event: response\.created\ndata: (?P<event>.*)\n")
_NUMBER = re.compile(rb'^data: \{"type":"[^"]*","sequence_number":(\d+)', re.MULTILINE)


class LastEvents:
    """Makes the events that end a failed stream.

    For a response of `/v1/responses` it keeps the first event, and the number of the newest one.
    """

    def __init__(self, head: Head) -> None:
        created = _CREATED.match(head.body)
        self._created = None if created is None else created["event"]
        self._newest = head.body

    def note(self, piece: bytes) -> None:
        """Note a piece of the stream, which is one or more whole events."""
        if self._created is not None and _NUMBER.search(piece):  # pings have none
            self._newest = piece

    def encode(self, error: Exception, scope: Scope) -> bytes:
        """Return the events that end the stream with an error. They repeat no items of a response."""
        _, body = error_body_for(scope, error)
        if speaks_anthropic(scope):
            return error_event(body)
        if self._created is None or not isinstance(body, ErrorBody):
            return sse.event(body)
        event, ending = failure_of(body.error)
        response = msgspec.json.decode(self._created)["response"]
        failed = {**response, "status": ending.status, "error": ending.error}
        number = int(_NUMBER.findall(self._newest)[-1])
        return _numbered(number + 1, event) + _numbered(number + 2, {"type": "response.failed", "response": failed})


def _numbered(number: int, event: dict[str, object]) -> bytes:
    return sse.typed_event({"type": event["type"], "sequence_number": number, **event})


class ClientAnswer:
    """Sends the answer to one client: its head, its body in pieces, its end or its failure."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._last_events: LastEvents | None = None  # of a stream
        self.started = False

    async def send(self, piece: Head | bytes) -> None:
        if isinstance(piece, Head):
            self.started = True
            self._last_events = LastEvents(piece) if piece.is_stream else None
            headers = [(name, value) for name, value in piece.headers if name != _REQUEST_ID]
            await self._send({"type": "http.response.start", "status": piece.status, "headers": headers})
            piece = piece.body
        elif self._last_events is not None:
            self._last_events.note(piece)
        if piece:
            await self._send(body_message(piece))

    async def end(self) -> None:
        await self._send(body_message(b"", more=False))

    async def fail(self, error: AengineError, scope: Scope, receive: Receive) -> None:
        """Answer with an error: a response of its own, or the last events of a stream that has begun."""
        if not self.started:
            await error_response(error)(scope, receive, self._send)
        elif self._last_events is not None:
            with suppress(OSError):
                await self._send(body_message(self._last_events.encode(error, scope), more=False))
        else:
            raise error  # a document is incomplete: Ray closes the connection


def with_request_id(scope: Scope, send: Send) -> Send:
    """Set the request id, which the engine will use too. Return `send`, which adds it to errors of Anthropic's API."""
    context_of(scope).request_id = request_id = request_id_of(Headers(scope=scope))
    own = (_REQUEST_ID, request_id.encode())
    scope["headers"] = [own, *((name, value) for name, value in scope["headers"] if name != _REQUEST_ID)]
    if not speaks_anthropic(scope):
        return send

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            others = [header for header in message["headers"] if header[0] != b"request-id"]
            message["headers"] = [*others, (b"request-id", own[1])]
        await send(message)

    return send_with_id

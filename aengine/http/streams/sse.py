"""Server-sent events: framing, event templates, and the response that streams events.

If a client leaves, `hypercorn/receiving.py` cancels the response, and the response aborts the engine's request. The
response is not a generator: if a blocked `send` is cancelled, the `finally` of a generator runs only when the generator
is garbage-collected.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import ClassVar, Protocol

import anyio
import anyio.lowlevel
import msgspec
from anyio import create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.errors import AengineError
from aengine.http.engine_like import StreamLike
from aengine.http.entry.context import context_of
from aengine.http.entry.errors import HTTPError, error_body_for
from aengine.http.hypercorn.in_flight import cancel_error
from aengine.http.streams.fragments import merge, sliced
from aengine.types import Fragment, Usage

_log = logging.getLogger(__name__)

_CHUNK = 2**16  # bytes; more waiting events are sent in several messages
_ERROR_EVENT_SECONDS = 1.0  # for sending the last event of a cancelled stream

encode = msgspec.json.Encoder().encode

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps proxies from buffering the stream
]
DONE = b"data: [DONE]\n\n"
PLACEHOLDER = "\x00hole\x00"
PING = b": ping\n\n"  # a comment, which clients skip; it reveals a dead connection


def event(payload: object) -> bytes:
    """Return one event with the payload as JSON."""
    return b"data: %b\n\n" % encode(payload)


def typed_event(payload: Mapping[str, object]) -> bytes:
    """Return one event with the payload as JSON, and its `type` as the event's name."""
    return b"event: %b\n%b" % (str(payload["type"]).encode(), event(payload))


def template(payload: object) -> bytes:
    """Return an encoded event as a format, for use as `template(...) % encode(text)`.

    Each `PLACEHOLDER` in the payload becomes a place for one JSON value.
    """
    return event(payload).replace(b"%", b"%%").replace(encode(PLACEHOLDER), b"%b")


def typed_template(payload: Mapping[str, object]) -> bytes:
    """Like `template`, with the payload's `type` as the event's name."""
    return b"event: %b\n%b" % (str(payload["type"]).encode(), template(payload))


class EventEncoder(Protocol):
    """Encodes the events of one request's stream."""

    ping: ClassVar[bytes] = PING  # sent after `heartbeat` seconds of silence

    def opening(self) -> bytes:
        """Return the events before the first token; empty for none."""
        return b""

    def event(self, fragment: Fragment) -> bytes:
        """Return the events for one fragment; empty for none."""
        ...

    def closing(self, usage: Usage | None) -> bytes:
        """Return the events after the last fragment."""
        ...

    def error(self, body: object) -> bytes:
        """Return the events that end a failing stream. body: the error in the format of the API."""
        return event(body)


class EventStreamResponse(Response):
    """Sends server-sent events. All waiting fragments are sent together.

    The encoder's ping is sent after `heartbeat` seconds of silence. If a reader is more than `max_stream_backlog`
    fragments behind, its request is aborted and its response ends unfinished.

    It derives from `Response` only because Starlette's handlers return one.
    """

    def __init__(self, stream: StreamLike, encoder: EventEncoder, config: ServerConfig) -> None:
        self.background = None
        self._stream = stream
        self._encoder = encoder
        self._heartbeat = config.heartbeat
        self._max_backlog = config.max_stream_backlog
        self._sent = 0  # messages
        self._sending = False
        self._pinging = False
        self._given_up = False  # the reader is too far behind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.work = self._stream
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(self._watch_progress, scope, send, tasks)
                await self._respond(scope, send)
                tasks.cancel_scope.cancel()
        finally:
            context.work = None
            self._stream.abort()

    async def _respond(self, scope: Scope, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
            pieces = context_of(scope).send_piece or send
            if opening := self._encoder.opening():
                await self._send(pieces, body_message(opening))
            last = await self._send_events(pieces)
        except AengineError as error:
            last = self._error_event(scope, error)
        except get_cancelled_exc_class():
            if (
                not self._given_up and not context_of(scope).client_left
            ):  # the server shuts down, or the reader has stalled
                with anyio.move_on_after(_ERROR_EVENT_SECONDS, shield=True):
                    await self._send(send, body_message(self._error_event(scope, cancel_error(scope)), more=False))
            raise
        except Exception as error:
            await self._send(send, body_message(self._error_event(scope, error), more=False))
            raise
        await self._send(send, body_message(last, more=False))

    def _error_event(self, scope: Scope, error: BaseException) -> bytes:
        _, body = error_body_for(scope, error)
        return self._encoder.error(body)

    async def _send_events(self, send: Send) -> bytes:
        """Send all messages but the last one. Return the body of the last one."""
        encoded, take = self._encoder.event, self._stream.take
        while fragments := await take():
            if len(fragments) == 1:
                chunk = encoded(fragments[0])
            else:
                chunk = b""
                for place, some in enumerate(sliced(fragments)):
                    if place:
                        await anyio.lowlevel.checkpoint()  # let other tasks run between slices
                    if len(chunk) > _CHUNK:
                        await self._send(send, body_message(chunk))
                        chunk = b""
                    chunk += b"".join(map(encoded, merge(some)))
            if (usage := fragments[-1].usage) is not None:
                return chunk + self._encoder.closing(usage)
            if chunk:
                await self._send(send, body_message(chunk))
        return self._encoder.closing(None)

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = True
        await send(message)
        self._sending = False
        self._sent += 1

    async def _watch_progress(self, scope: Scope, send: Send, tasks: TaskGroup) -> None:
        # One timer for each stream, not for each token: it checks regularly whether anything was sent.
        tick = min(1.0, self._heartbeat)
        seen, silence = self._sent, 0.0
        while True:
            await anyio.sleep(tick)
            if self._stream.backlog > self._max_backlog:
                _log.warning("%s: its reader is %d fragments behind; aborted", self._stream.id, self._stream.backlog)
                self._given_up = True
                if (disconnect := context_of(scope).disconnect) is not None:
                    disconnect(HTTPError(408, "reader_timeout", f"{self._stream.backlog} fragments were not read"))
                tasks.cancel_scope.cancel()
                return
            silence = silence + tick if self._sent == seen and not self._sending else 0.0
            seen = self._sent
            if silence >= self._heartbeat and not self._pinging:
                silence = 0.0
                tasks.start_soon(self._ping, send)  # in a task, because it may block

    async def _ping(self, send: Send) -> None:
        self._pinging = True
        await send(body_message(self._encoder.ping))
        self._pinging = False


def body_message(chunk: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}

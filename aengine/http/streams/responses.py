"""The two kinds of responses: server-sent events, or one JSON document. However a response ends, its request ends in
the engine.

A client that leaves cancels it (hypercorn/receiving.py). A generator's own `finally` would not do: where the
cancellation meets a `send` that is blocked, it runs when the generator is collected.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import ClassVar, Protocol

import anyio
import anyio.lowlevel
from anyio import create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.errors import AengineError
from aengine.http.door.anthropic_errors import REQUEST_ID
from aengine.http.door.errors import HTTPError, error_body_for
from aengine.http.engine_like import StreamLike
from aengine.http.hypercorn.in_flight import ACTIVE_REQUEST, ActiveRequest, cancel_error
from aengine.http.hypercorn.receiving import client_disconnected
from aengine.http.streams import sse
from aengine.http.streams.fragments import collect, merge
from aengine.http.streams.slices import document, sliced
from aengine.types import Completion, Fragment, Usage

_log = logging.getLogger(__name__)

_CHUNK = 2**16  # bytes; what waits is sent in more than one message beyond that
_ERROR_EVENT_SECONDS = 1.0  # for the last event of a stream that the server cancels


class EventEncoder(Protocol):
    """Encodes the events of one endpoint's stream; one instance per request."""

    ping: ClassVar[bytes] = sse.PING  # what breaks a silence

    def opening(self) -> bytes:
        """The events before the first token; empty for none."""
        ...

    def event(self, fragment: Fragment) -> bytes:
        """The events for one fragment; empty when it holds nothing that this endpoint shows."""
        ...

    def closing(self, usage: Usage | None) -> bytes:
        """The events after the last fragment."""
        ...

    def error(self, body: object) -> bytes:
        """The events that end a stream which fails on its way; `body` is what a refusal would bring."""
        return sse.event(body)


class _StreamResponse(Response, ABC):
    """The base of both responses: notes its stream in the request in flight, and aborts it in the end. `Response` is
    the base only because Starlette's handlers return one.
    """

    def __init__(self, stream: StreamLike) -> None:
        self.background = None
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: ActiveRequest | None = scope.get(ACTIVE_REQUEST)
        if request is not None:
            request.stream, request.request_id = self._stream, scope.get(REQUEST_ID)
        try:
            await self._answer(scope, receive, send)
        finally:
            self._stream.abort()
            if request is not None:
                request.stream = None

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class EventStreamResponse(_StreamResponse):
    """Server-sent events, one `send` per wake-up; fragments that wait together are sent together.

    The encoder's ping goes out after `heartbeat` seconds of silence. A reader that is more than `max_backlog`
    fragments behind is given up: its request is aborted and its response ends unfinished.
    """

    def __init__(self, stream: StreamLike, encoder: EventEncoder, *, heartbeat: float, max_backlog: int) -> None:
        super().__init__(stream)
        self._encoder = encoder
        self._heartbeat = heartbeat
        self._max_backlog = max_backlog
        self._sent = 0  # messages
        self._sending = False
        self._pinging = False
        self._given_up = False  # its reader

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with create_task_group() as tasks:
            tasks.start_soon(self._watch_progress, scope, send, tasks)
            await self._pump(scope, send)
            tasks.cancel_scope.cancel()

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
            if opening := self._encoder.opening():
                await self._send(send, _body(opening))
            last = await self._send_events(send)
        except AengineError as error:
            last = self._error_event(scope, error)
        except get_cancelled_exc_class():
            if not self._given_up and not client_disconnected(scope):  # the server shuts down, or nothing is read
                with anyio.move_on_after(_ERROR_EVENT_SECONDS, shield=True):
                    await self._send(send, _body(self._error_event(scope, cancel_error(scope)), more=False))
            raise
        except Exception as error:
            await self._send(send, _body(self._error_event(scope, error), more=False))
            raise
        await self._send(send, _body(last, more=False))

    def _error_event(self, scope: Scope, error: BaseException) -> bytes:
        _, body = error_body_for(scope, error)
        return self._encoder.error(body)

    async def _send_events(self, send: Send) -> bytes:
        """Send all but the last message, which is returned."""
        event, take = self._encoder.event, self._stream.take
        while fragments := await take():
            if len(fragments) == 1:
                chunk = event(fragments[0])
            else:
                chunk = b""
                for place, some in enumerate(sliced(fragments)):
                    if place:
                        await anyio.lowlevel.checkpoint()  # far behind, or many choices: the loop turns in between
                    if len(chunk) > _CHUNK:
                        await self._send(send, _body(chunk))
                        chunk = b""
                    chunk += b"".join(map(event, merge(some)))
            if (usage := fragments[-1].usage) is not None:
                return chunk + self._encoder.closing(usage)
            if chunk:
                await self._send(send, _body(chunk))
        return self._encoder.closing(None)

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = True
        await send(message)
        self._sending = False
        self._sent += 1

    async def _watch_progress(self, scope: Scope, send: Send, tasks: TaskGroup) -> None:
        # One timer per stream, not per token: it looks now and then whether anything moved.
        tick = min(1.0, self._heartbeat)
        seen, silence = self._sent, 0.0
        while True:
            await anyio.sleep(tick)
            if self._stream.backlog > self._max_backlog:
                _log.warning("%s: its reader is %d fragments behind; aborted", self._stream.id, self._stream.backlog)
                self._given_up = True
                request: ActiveRequest | None = scope.get(ACTIVE_REQUEST)
                if request is not None:
                    error = HTTPError(408, "reader_timeout", f"{self._stream.backlog} fragments were not read")
                    await request.cut(error, recently=tick)
                tasks.cancel_scope.cancel()
                return
            silence = silence + tick if self._sent == seen and not self._sending else 0.0
            seen = self._sent
            if silence >= self._heartbeat and not self._pinging:
                silence = 0.0
                tasks.start_soon(self._ping, send)  # by itself: it may block, and the watch goes on

    async def _ping(self, send: Send) -> None:
        self._pinging = True
        await send(_body(self._encoder.ping))
        self._pinging = False


def _body(chunk: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


class DocumentResponse(_StreamResponse):
    """One JSON document, sent when the last token is there."""

    def __init__(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> None:
        super().__init__(stream)
        self._body_of = body_of

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces = document(await self._body_of(await collect(self._stream)))
        length = str(sum(map(len, pieces))).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        *others, last = pieces
        for piece in others:
            await send(_body(piece))
        await send(_body(last, more=False))

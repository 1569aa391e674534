"""Counts the requests that are being answered and their answers by status, waits for the last one, cuts them off, and
resets readers that take nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import anyio
import h11
from anyio.abc import TaskStatus
from hypercorn.events import RawData
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.errors import AengineError, EngineClosedError
from aengine.http.door.context import Abortable, RequestContext, context_of
from aengine.http.door.errors import HTTPError, error_response
from aengine.http.hypercorn.accepted import chunked, reset_connection

_log = logging.getLogger(__name__)

_ERROR_RESPONSE_SECONDS = 1.0
_PIECE = 2**16  # bytes
SHUTTING_DOWN = "the server is shutting down"
OTHER = "other"  # a method that HTTP does not define, or a path that leads nowhere
LEFT = 499  # the client was gone before its answer began
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class InFlight:
    """Middleware around `app` that keeps the set of requests in flight. A request that is cut off before its answer
    began is answered here: 503.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._active: set[ActiveRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stalled = 0  # readers given up since start
        self.statuses = StatusCounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as cut:
            context = context_of(scope)
            request = ActiveRequest(cut, send, context)
            context.send_piece, context.cut = request.send, request.cut
            self._active.add(request)
            self._idle.clear()
            try:
                await self.app(scope, receive, request.send)
            except anyio.get_cancelled_exc_class():
                if request.status is None:  # its body was still on its way, or its prompt was being read
                    closed = error_response(cancel_error(scope), {"Connection": "close"})
                    with anyio.move_on_after(_ERROR_RESPONSE_SECONDS, shield=True):
                        await closed(scope, receive, request.send)
                raise
            finally:
                self._active.discard(request)
                self.statuses.add(scope, request.status)
                if not self._active:
                    self._idle.set()

    @property
    def blocked(self) -> int:
        """The number of responses that wait for their readers."""
        return sum(request.pending > 0 for request in self._active)

    def abort(self, request_id: str) -> int:
        """End the requests of that id that the engine works on; returns how many there were.

        It may be the id in their answer or an `X-Request-Id`, which several may share. What generates ends with
        finish_reason "abort", what embeds or scores with `RequestAbortedError`.
        """
        found = 0
        for request in self._active:
            context = request.context
            if context.work is not None and request_id in (context.work.id, context.request_id):
                found += context.work.abort() is not False
        return found

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """End every request; streams end with an error event."""
        for request in list(self._active):
            request.scope.cancel()

    async def watch_readers(
        self, seconds: float, *, task_status: TaskStatus[anyio.CancelScope] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Cut the connections of readers that let a `send` wait for `seconds`, until the scope that this hands out is
        cancelled.
        """
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            while True:  # one timer for all of them
                await anyio.sleep(min(1.0, seconds / 4))
                self._cut_stalled(seconds)

    def _cut_stalled(self, seconds: float) -> None:
        for request in list(self._active):
            if request.pending and monotonic() - request.last_progress > seconds:
                if not request.disconnected:
                    _log.warning("a reader took nothing for %g s: its connection was cut", seconds)
                    self.stalled += 1
                cancel_error = HTTPError(408, "reader_timeout", f"nothing of the answer was read for {seconds:g} s")
                request.cut(cancel_error)


class ActiveRequest:
    """One request in flight: the scope of its task, and the progress of its reader."""

    __slots__ = (
        "_chunks",
        "_send",
        "context",
        "disconnected",
        "last_progress",
        "pending",
        "scope",
        "status",
    )

    def __init__(self, scope: anyio.CancelScope, send: Send, context: RequestContext) -> None:
        self.scope = scope
        self.context = context
        self._send = send
        self._chunks: tuple[h11.Connection, Callable[[RawData], Awaitable[None]]] | None = None  # see `chunked`
        self.status: int | None = None  # once the answer has begun
        self.disconnected = False
        self.pending = 0  # sends that have not returned: the reader's buffers are full
        self.last_progress = 0.0  # monotonic seconds when one began after none, or returned

    async def send(self, message: Message) -> None:
        if self.status is None:
            self.status = message.get("status", 0)
        if not self.pending:
            self.last_progress = monotonic()
        self.pending += 1
        try:
            body, piece = message.get("body", b""), message
            if self._chunks is not None and 0 < len(body) <= _PIECE and message.get("more_body", False):
                connection, write = self._chunks
                if connection.our_state is h11.SEND_BODY:
                    await write(RawData(data=b"%x\r\n%b\r\n" % (len(body), body)))
                    return
            for start in range(0, len(body), _PIECE) or (0,):
                if len(body) > _PIECE:  # in one piece, who takes much slowly would look like who takes nothing
                    end = start + _PIECE
                    more = end < len(body) or message.get("more_body", False)
                    piece = {**message, "body": body[start:end], "more_body": more}
                await self._send(piece)
                self.last_progress = monotonic()
            if "status" in message:
                self._chunks = chunked(self._send)
        finally:
            self.pending -= 1
            self.last_progress = monotonic()

    def cut(self, cancel_error: AengineError) -> None:
        """End the connection, so that the response sees its client leave; if that is not possible, cancel the response
        alone.
        """
        self.disconnected = True
        self.last_progress = monotonic()
        self.context.cancel_error = cancel_error
        if not reset_connection(self._send):
            self.scope.cancel()


@contextmanager
def at_work(scope: Scope, work: Abortable) -> Iterator[None]:
    """Meanwhile the engine does `work` for a request, and it may be aborted by its id or by the request's own."""
    context = context_of(scope)
    context.work = work
    try:
        yield
    finally:
        context.work = None


def cancel_error(scope: Scope) -> AengineError:
    """The error for the client of a response that is cancelled."""
    return context_of(scope).cancel_error or EngineClosedError(SHUTTING_DOWN)


class StatusCounts:
    """Answers by method, path and status, of which there are few whatever clients ask for. Updated once an answer has
    ended: one dictionary entry, nothing while it is being sent.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, int]] = Counter()  # (method, path as the routes write it, status)

    def add(self, scope: Scope, status: int | None) -> None:
        """Count the answer to a request; `status` is None if none was sent."""
        if scope["type"] == "http":
            method, route = scope.get("method", OTHER), scope.get("route")
            path = route.path if isinstance(route, Route) else _path_of_refused(scope)
            self.answers[method if method in _METHODS else OTHER, path, status or LEFT] += 1


def _path_of_refused(scope: Scope) -> str:
    """The route's path of a request that was refused before it was routed."""
    app = scope.get("app")
    routes = () if app is None else app.routes
    return next((one.path for one in routes if isinstance(one, Route) and one.path == scope["path"]), OTHER)

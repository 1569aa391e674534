"""Tracks the requests in flight: counts, aborts and cancels them, and closes connections whose readers stall."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from time import monotonic

import anyio
import h11
from anyio.abc import TaskStatus
from hypercorn.events import RawData
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.errors import AengineError, EngineClosedError
from aengine.http.entry.context import RequestContext, context_of
from aengine.http.entry.errors import HTTPError, error_response
from aengine.http.hypercorn.accepted import chunked, reset_connection

_log = logging.getLogger(__name__)

_ERROR_RESPONSE_SECONDS = 1.0
_PIECE = 2**16  # bytes
SHUTTING_DOWN = "the server is shutting down"
OTHER = "other"  # an undefined method, or a path without a route
LEFT = 499  # the client left before its answer began
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class InFlight:
    """Middleware that keeps track of the requests in flight.

    A request that is cancelled before its answer began is answered with 503 here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._active: set[ActiveRequest] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stalled = 0  # connections closed because their readers stalled, since the start
        self.statuses = StatusCounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as cancel_scope:
            context = context_of(scope)
            request = ActiveRequest(cancel_scope, send, context)
            context.send_piece, context.disconnect = request.send, request.disconnect
            self._active.add(request)
            self._idle.clear()
            try:
                await self.app(scope, receive, request.send)
            except anyio.get_cancelled_exc_class():
                if request.status is None:  # its body or its prompt was still being read
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
        """The number of responses whose readers are behind."""
        return sum(request.pending > 0 for request in self._active)

    def abort(self, request_id: str) -> int:
        """End the requests of this id that the engine works on, and return their number.

        The id is that of an answer, or an `X-Request-Id`, which several requests may share. A generation ends with
        finish_reason "abort"; an embedding or a score ends with `RequestAbortedError`.
        """
        found = 0
        for request in self._active:
            context = request.context
            if context.work is not None and request_id in (context.work.id, context.request_id):
                found += context.work.abort() is not False
        return found

    async def idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """Cancel every request. Streams end with an error event."""
        for request in list(self._active):
            request.cancel_scope.cancel()

    async def watch_readers(
        self, seconds: float, *, task_status: TaskStatus[anyio.CancelScope] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Close connections whose readers let a `send` wait for `seconds`.

        Run until the cancel scope passed to `started` is cancelled.
        """
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            while True:  # one timer for all requests
                await anyio.sleep(min(1.0, seconds / 4))
                self._disconnect_stalled(seconds)

    def _disconnect_stalled(self, seconds: float) -> None:
        for request in list(self._active):
            if request.pending and monotonic() - request.last_progress > seconds:
                if not request.disconnected:
                    _log.warning("a client read nothing for %g s: its connection was closed", seconds)
                    self.stalled += 1
                cancel_error = HTTPError(408, "reader_timeout", f"nothing of the answer was read for {seconds:g} s")
                request.disconnect(cancel_error)


class ActiveRequest:
    """One request in flight: the cancel scope of its task, and the progress of its reader."""

    __slots__ = (
        "_chunks",
        "_send",
        "cancel_scope",
        "context",
        "disconnected",
        "last_progress",
        "pending",
        "status",
    )

    def __init__(self, cancel_scope: anyio.CancelScope, send: Send, context: RequestContext) -> None:
        self.cancel_scope = cancel_scope
        self.context = context
        self._send = send
        self._chunks: tuple[h11.Connection, Callable[[RawData], Awaitable[None]]] | None = None  # see `chunked`
        self.status: int | None = None  # once the answer has begun
        self.disconnected = False
        self.pending = 0  # sends that have not returned, because the reader's buffers are full
        self.last_progress = (
            0.0  # monotonic seconds at which the oldest pending send began, or the latest send returned
        )

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
                if len(body) > _PIECE:  # one long send to a slow reader would look like a stall
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

    def disconnect(self, cancel_error: AengineError) -> None:
        """Close the connection, so that the response sees a disconnect. If it cannot be closed, cancel the response."""
        self.disconnected = True
        self.last_progress = monotonic()
        self.context.cancel_error = cancel_error
        if not reset_connection(self._send):
            self.cancel_scope.cancel()


def cancel_error(scope: Scope) -> AengineError:
    """Return the error for the client of a cancelled response."""
    return context_of(scope).cancel_error or EngineClosedError(SHUTTING_DOWN)


class StatusCounts:
    """Counts answers by method, route and status. Clients cannot add other methods or paths.

    An answer is counted after it has ended, so sending it costs nothing more.
    """

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, str, int]] = Counter()  # by (method, path of the route, status)

    def add(self, scope: Scope, status: int | None) -> None:
        """Count an answer. status: None if none was sent."""
        if scope["type"] == "http":
            method, route = scope.get("method", OTHER), scope.get("route")
            path = route.path if isinstance(route, Route) else _path_of_refused(scope)
            self.answers[method if method in _METHODS else OTHER, path, status or LEFT] += 1


def _path_of_refused(scope: Scope) -> str:
    """Return the path of the route for a request that was refused before it was routed."""
    app = scope.get("app")
    routes = () if app is None else app.routes
    return next((one.path for one in routes if isinstance(one, Route) and one.path == scope["path"]), OTHER)

"""The requests that are being answered: counted, so that a server can wait for the last one, or cut them all off."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Set
from time import monotonic

import anyio
from anyio.abc import TaskStatus
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.errors import AengineError, EngineClosedError
from aengine.http.door.errors import HTTPError, error_response
from aengine.http.door.status_counts import StatusCounts
from aengine.http.hypercorn.connection import connection_of, reset_connection, room_to_send

_log = logging.getLogger(__name__)

_LAST_WORDS = 1.0  # seconds
_PIECE = 2**16  # bytes
SHUTTING_DOWN = "the server is shutting down"
ANSWERING = "aengine.answering"  # in a request's scope: its `Answering`


class InFlight:
    """Wraps `app`, the HTTP side. A request that is cut off before its answer began is answered here: 503."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answering: set[Answering] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.stalled = 0  # readers given up since start
        self.statuses = StatusCounts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as cut:
            scope[ANSWERING] = one = Answering(cut, send, self._answering, scope.get("http_version") == "2")
            self._answering.add(one)
            self._idle.clear()
            try:
                await self._answer(scope, receive, one)
            finally:
                self._answering.discard(one)
                self.statuses.add(scope, one.status)
                if not self._answering:
                    self._idle.set()

    async def _answer(self, scope: Scope, receive: Receive, one: Answering) -> None:
        try:
            await self.app(scope, receive, one.send)
        except anyio.get_cancelled_exc_class():
            if one.status is None:  # its body was still on its way, or its prompt was being read
                closed = error_response(one.why, {"Connection": "close"})
                with anyio.move_on_after(_LAST_WORDS, shield=True):
                    await closed(scope, receive, one.send)
            raise

    @property
    def blocked(self) -> int:
        """Responses that wait for their readers."""
        return sum(one.pending > 0 for one in self._answering)

    async def idle(self) -> None:
        """Wait until no request is being answered."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """End every request; streams end with an error event."""
        for one in list(self._answering):
            one.scope.cancel()

    async def watch_readers(
        self, seconds: float, *, task_status: TaskStatus[anyio.CancelScope] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Give up readers that let a `send` wait for so long, until the scope that this hands out is cancelled."""
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            while True:  # one timer for all of them
                await anyio.sleep(min(1.0, seconds / 4))
                await self._cut_stalled(seconds)

    async def _cut_stalled(self, seconds: float) -> None:
        for one in list(self._answering):
            if one.pending and monotonic() - one.moved > seconds:
                if not one.given_up:
                    _log.warning("a reader took nothing for %g s: its connection was cut", seconds)
                    self.stalled += 1
                why = HTTPError(408, "reader_timeout", f"nothing of the answer was read for {seconds:g} s")
                await one.cut(why, recently=seconds / 2)


class Answering:
    """One request: the scope of its task, and whether its reader keeps up."""

    __slots__ = ("_all", "_multiplexed", "_send", "given_up", "moved", "pending", "scope", "status", "why")

    def __init__(self, scope: anyio.CancelScope, send: Send, everyone: Set[Answering], multiplexed: bool) -> None:
        self.scope = scope
        self._send = send
        self._all = everyone
        self._multiplexed = multiplexed  # HTTP/2
        self.why: AengineError = EngineClosedError(SHUTTING_DOWN)  # what cancels it, for its client
        self.status: int | None = None  # once the answer has begun
        self.given_up = False
        self.pending = 0  # sends that have not returned: the reader's buffers are full
        self.moved = 0.0  # monotonic seconds when one began after none, or returned

    async def send(self, message: Message) -> None:
        if self.status is None:
            self.status = message.get("status", 0)
        if not self.pending:
            self.moved = monotonic()
        self.pending += 1
        try:
            body, start = message.get("body", b""), 0
            while len(body) - start > _PIECE:  # in one piece, who takes much slowly would look like who takes nothing
                await self._pass_on({**message, "body": body[start : start + _PIECE], "more_body": True})
                self.moved = monotonic()
                start += _PIECE
            await self._pass_on({**message, "body": body[start:]} if start else message)
        finally:
            self.pending -= 1
            self.moved = monotonic()

    async def _pass_on(self, message: Message) -> None:
        await self._send(message)
        if self._multiplexed:
            await room_to_send(self._send)

    async def cut(self, why: AengineError, recently: float) -> None:
        """End the connection, so that the reply sees its client leave; where that is not possible, the reply alone.

        recently: seconds. A connection that took something of another reply since then goes on.
        """
        self.given_up = True
        self.moved = monotonic()
        self.why = why
        if not await reset_connection(self._send, self._others_move(recently)):
            self.scope.cancel()

    def _others_move(self, recently: float) -> bool:
        if not self._multiplexed:
            return False
        since, mine = monotonic() - recently, connection_of(self._send)
        return any(
            not one.given_up and one.moved > since and one is not self and connection_of(one._send) is mine
            for one in self._all
        )


def why_cut(scope: Scope) -> AengineError:
    """The error for the client of a reply that is cancelled."""
    one: Answering | None = scope.get(ANSWERING)
    return EngineClosedError(SHUTTING_DOWN) if one is None else one.why

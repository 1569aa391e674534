"""The two ways of answering: event by event, or at once. Both end the request in the engine when the client leaves.

An ASGI server tells of a disconnect only through `receive()`: `send()` to a client that left just succeeds, and a
handler is not cancelled. So each reply keeps a task on `receive()`, and its `finally` aborts however it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import anyio.lowlevel
from anyio import CancelScope, create_task_group, get_cancelled_exc_class
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.errors import AengineError
from aengine.http.door.errors import HTTPError, error_body, error_response
from aengine.http.engine_like import StreamLike
from aengine.http.hypercorn.in_flight import ANSWERING, Answering, why_cut
from aengine.http.streams import sse
from aengine.http.streams.fragments import collect, merge
from aengine.http.streams.slices import SLICE
from aengine.types import Completion, Fragment, Usage

_log = logging.getLogger(__name__)

_LAST_WORDS = 1.0  # seconds that a stream which the server cancels may take to say so


class Dialect(Protocol):
    """How one endpoint words its events; one instance per request."""

    def opening(self) -> bytes:
        """What precedes the first token; empty for nothing."""
        ...

    def event(self, fragment: Fragment) -> bytes:
        """One fragment; empty when it holds nothing that this endpoint shows."""
        ...

    def closing(self, usage: Usage | None) -> bytes:
        """What follows the last fragment."""
        ...


class _Reply(Response):
    """What both replies share. `Response` is the base only because Starlette's handlers return one."""

    def __init__(self, stream: StreamLike) -> None:
        self.background = None
        self._stream = stream
        self._left = False  # the client
        self._ending = False  # the last message is on its way: a disconnect has nothing left to cancel

    async def _watch_client(self, receive: Receive, scope: CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        if not self._ending:
            scope.cancel()


class StreamingReply(_Reply):
    """Server-sent events, one `send` per wake-up; what waits together is said together.

    A comment goes out after `heartbeat` seconds of silence. A reader that is more than `max_backlog` fragments
    behind is given up: its request is aborted and its response ends unfinished.
    """

    def __init__(self, stream: StreamLike, dialect: Dialect, *, heartbeat: float, max_backlog: int) -> None:
        super().__init__(stream)
        self._dialect = dialect
        self._heartbeat = heartbeat
        self._max_backlog = max_backlog
        self._sent = 0  # messages
        self._sending = False
        self._pinging = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
                tasks.start_soon(self._watch_progress, scope, send, tasks)
                await self._pump(scope, send)
                tasks.cancel_scope.cancel()
        finally:
            self._stream.abort()

    async def _pump(self, scope: Scope, send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": sse.HEADERS})
            if opening := self._dialect.opening():
                await self._send(send, _body(opening))
            last = await self._tell(send)
        except AengineError as error:
            last = sse.event(error_body(error))
        except get_cancelled_exc_class():
            if not self._left:  # the server shuts down, or nothing is read
                with anyio.move_on_after(_LAST_WORDS, shield=True):
                    await self._finish(send, sse.event(error_body(why_cut(scope))))
            raise
        except Exception as error:
            await self._finish(send, sse.event(error_body(error)))
            raise
        await self._finish(send, last)

    async def _tell(self, send: Send) -> bytes:
        """Send all but the last message, which is returned."""
        event, take = self._dialect.event, self._stream.take
        while fragments := await take():
            if len(fragments) == 1:
                chunk = event(fragments[0])
            else:
                parts: list[bytes] = []
                for start in range(0, len(fragments), SLICE):
                    if start:
                        await anyio.lowlevel.checkpoint()  # far behind, or many choices: the loop turns in between
                    parts += [event(fragment) for fragment in merge(fragments[start : start + SLICE])]
                chunk = b"".join(parts)
            if (usage := fragments[-1].usage) is not None:
                return chunk + self._dialect.closing(usage)
            if chunk:
                await self._send(send, _body(chunk))
        return self._dialect.closing(None)

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = True
        await send(message)
        self._sending = False
        self._sent += 1

    async def _finish(self, send: Send, chunk: bytes) -> None:
        self._ending = self._sending = True
        await send(_body(chunk, more=False))

    async def _watch_progress(self, scope: Scope, send: Send, tasks: TaskGroup) -> None:
        # One timer per stream, not per token: it looks now and then whether anything moved.
        tick = min(1.0, self._heartbeat)
        seen, silence = self._sent, 0.0
        while True:
            await anyio.sleep(tick)
            if self._stream.backlog > self._max_backlog:
                _log.warning("%s: its reader is %d fragments behind; aborted", self._stream.id, self._stream.backlog)
                self._left = True
                one: Answering | None = scope.get(ANSWERING)
                if one is not None:
                    why = HTTPError(408, "reader_timeout", f"{self._stream.backlog} fragments were not read")
                    await one.cut(why, recently=tick)
                tasks.cancel_scope.cancel()
                return
            silence = silence + tick if self._sent == seen and not self._sending else 0.0
            seen = self._sent
            if silence >= self._heartbeat and not self._pinging:
                silence = 0.0
                tasks.start_soon(self._ping, send)  # by itself: it may block, and the watch goes on

    async def _ping(self, send: Send) -> None:
        self._pinging = True
        await send(_body(sse.PING))
        self._pinging = False


def _body(chunk: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": more}


class WholeReply(_Reply):
    """One JSON document, when the last token is there."""

    def __init__(self, stream: StreamLike, word: Callable[[Completion], Awaitable[bytes]]) -> None:
        super().__init__(stream)
        self._word = word

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response | None = None
        failure: AengineError | None = None
        try:
            async with create_task_group() as tasks:
                tasks.start_soon(self._watch_client, receive, tasks.cancel_scope)
                try:
                    response = Response(await self._word(await collect(self._stream)), media_type="application/json")
                except AengineError as error:
                    failure = error
                except get_cancelled_exc_class():
                    if not self._left:  # the server shuts down
                        with anyio.move_on_after(_LAST_WORDS, shield=True):
                            await error_response(why_cut(scope))(scope, receive, send)
                    raise
                tasks.cancel_scope.cancel()
        finally:
            self._stream.abort()
        if failure is not None:
            raise failure  # for the exception handlers, outside of the task group
        if response is not None:
            await response(scope, receive, send)

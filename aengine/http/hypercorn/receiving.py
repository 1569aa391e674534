"""Reads a request's body to its end, and cancels its handler if its client disconnects afterwards.

Most refusals are sent before the body has arrived. If the server stopped reading then, it would reset the connection,
and the client might never see the answer. hypercorn passes a body on through a short queue. If this queue is full and
is not read, the connection waits for ever, even after its client has left.

An ASGI server reports a disconnect only through `receive()`: `send()` to a client that left succeeds, and the handler
is not cancelled. So one task for each request waits in `receive()` after the body has been read.
"""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.entry.context import RequestContext, context_of
from aengine.http.entry.errors import HTTPError, error_response

_PATIENCE = 0.05  # seconds that an early answer waits for the body; if the body arrives, the connection stays open
# Limits on reading the rest of a body after an early answer.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20
_CLOSE = (b"connection", b"close")


class Receiving:
    """Middleware that cancels the application if its client disconnects.

    If an answer begins before the whole body has arrived, it waits briefly for the body. If it is still incomplete,
    the answer has `Connection: close`, and the body is read for a while before the answer ends.

    A request in another version than HTTP/1.0 or 1.1 is refused. So is a request that gives its length in two ways, and
    its connection is closed. A proxy may have used the other length. Then the rest of the data would be a request that
    the proxy has not checked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await self._serve(scope, receive, send, tasks)
            except Exception as error:  # noqa: BLE001 - raised below, without an exception group around it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _serve(self, scope: Scope, receive: Receive, send: Send, tasks: TaskGroup) -> None:
        client = _Client(receive, tasks, context_of(scope))

        async def send_reading(message: Message) -> None:
            """Send and read at once, so that hypercorn's queue has room for a disconnect message."""
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.discard)
                await send(message)
                tasks.cancel_scope.cancel()

        async def send_early(message: Message) -> None:
            if message["type"] == "http.response.start" and not client.ended:
                with anyio.move_on_after(_PATIENCE):
                    await client.discard(_LINGER_BYTES)
                headers = list(message["headers"])
                if not client.ended and _CLOSE not in headers:
                    message["headers"] = [*headers, _CLOSE]
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if client.ended or not last:
                client.answered = client.answered or last
                await send(message)
                return
            await send_reading({**message, "more_body": True})
            with anyio.move_on_after(_LINGER_SECONDS):
                await client.discard(_LINGER_BYTES)
            await send_reading({"type": "http.response.body", "body": b"", "more_body": False})

        if (refusal := _refusal(scope)) is None:
            await self._app(scope, client.receive, send_early)
        else:
            await error_response(refusal, {"Connection": "close"})(scope, client.receive, send_early)


def _refusal(scope: Scope) -> HTTPError | None:
    if not (version := scope["http_version"]).startswith("1."):
        spoken = f"this server speaks HTTP/1.1 alone, and was spoken to in HTTP/{version}"
        return HTTPError(505, "http_version_not_supported", spoken)
    if {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():
        return HTTPError(400, "two_lengths", "Content-Length and Transfer-Encoding must not be sent together")
    return None


class _Client:
    """The client of one request: it reads the body, then watches for a disconnect."""

    def __init__(self, receive: Receive, tasks: TaskGroup, context: RequestContext) -> None:
        self._receive = receive
        self._tasks = tasks
        self._context = context
        self._watched = False
        self.ended = False  # the body has arrived, or the client has left
        self.answered = False  # the last message is being sent, so nothing is left to cancel

    async def receive(self) -> Message:
        """The application's `receive()`. The client is watched as soon as the whole body has been read."""
        if self._watched:
            await anyio.sleep_forever()  # the next message is a disconnect, which cancels the application
        message = await self._receive()
        self.ended = self.ended or not message.get("more_body", False)
        if self.ended and message["type"] == "http.request":
            self._watched = True
            self._tasks.start_soon(self._watch)
        return message

    async def discard(self, most: float = float("inf")) -> None:
        """Read to the end of the body, or until more than `most` bytes have arrived."""
        size = 0
        while not self.ended and size <= most:
            message = await self._receive()
            self.ended = not message.get("more_body", False)
            size += len(message.get("body", b""))

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._context.client_left = True
        if not self.answered:
            self._tasks.cancel_scope.cancel()

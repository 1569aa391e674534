"""Reads a request's body to its end, and cancels its handler when its client disconnects after that.

A server that stopped reading after an early answer, as most refusals are, would reset the connection, and the client
might never see it. hypercorn would do worse: it hands a body over through a short queue, and once that is full and
nobody takes from it, the connection waits for ever, even when its client is long gone.

An ASGI server tells of a disconnect only through `receive()`: `send()` to a client that left just succeeds, and a
handler is not cancelled. So one task per request waits there once its body has been read, whether its prompt is being
tokenized, stands in a queue or is being answered.
"""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.door.context import RequestContext, context_of
from aengine.http.door.errors import HTTPError, error_response

_PATIENCE = 0.05  # seconds that an early answer waits: most bodies have arrived by then, and the connection may go on
# What is spent on the rest of a body after an early answer has been sent.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20
_CLOSE = (b"connection", b"close")


class Receiving:
    """Middleware that cancels the application when its client disconnects, and its answer then goes nowhere; that sends
    an early answer soon, reads on for a while, and only then ends it.

    The connection ends with the answer, which says so, unless the body had arrived.

    A request in another version than HTTP/1.0 or 1.1 is refused. A request that gives its length in two ways is
    refused and its connection closed: a proxy in front may have believed the other one, and what follows would be a
    request of its own that the proxy has never seen.
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
            except Exception as error:  # noqa: BLE001 - raised below, as it is instead of in a group
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _serve(self, scope: Scope, receive: Receive, send: Send, tasks: TaskGroup) -> None:
        client = _Client(receive, tasks, context_of(scope))

        async def send_reading(message: Message) -> None:
            """Read on meanwhile, so that hypercorn's queue has room for the news that the client has left."""
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
    def __init__(self, receive: Receive, tasks: TaskGroup, context: RequestContext) -> None:
        self._receive = receive
        self._tasks = tasks
        self._context = context
        self._watched = False
        self.ended = False  # its body, or it has left
        self.answered = False  # the last message is on its way: there is nothing left to cancel

    async def receive(self) -> Message:
        """The application's own: once it has the whole body, the client is watched."""
        if self._watched:
            await anyio.sleep_forever()  # what would come next cancels
        message = await self._receive()
        self.ended = self.ended or not message.get("more_body", False)
        if self.ended and message["type"] == "http.request":
            self._watched = True
            self._tasks.start_soon(self._watch)
        return message

    async def discard(self, most: float = float("inf")) -> None:
        """Read to the end of the body, or until more than `most` bytes of it have come."""
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

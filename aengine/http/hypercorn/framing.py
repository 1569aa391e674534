"""Reads bodies to their end even when the answer comes first, as most refusals do, and gives that end once.

A server that stopped reading after an early answer would reset the connection, and the client might never see it.
hypercorn would do worse: it hands a body over through a short queue, and once that is full and nobody takes from it,
the connection waits for ever, even when its client is long gone.
"""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aengine.http.door.errors import HTTPError, error_response

_PATIENCE = 0.05  # seconds that an early answer waits: most bodies have arrived by then, and the connection may go on
# What is spent on the rest of a body after an early answer has been sent.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20
_CLOSE = (b"connection", b"close")


class Framing:
    """Middleware that sends an early answer soon, reads on for a while, and only then ends it.

    Over HTTP/1 the connection ends with the answer, which says so, unless the body had arrived. Over HTTP/2 it goes
    on, and hypercorn gives it up with all its streams when one that is over gets more: so there it is read for as
    long as any body may take (`body_timeout`, seconds).

    A request that gives its length in two ways is refused and its connection closed: a proxy in front may have
    believed the other one, and what follows would be a request of its own that the proxy has never seen.
    """

    def __init__(self, app: ASGIApp, body_timeout: float) -> None:
        self._app = app
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        shared = not scope["http_version"].startswith("1")
        seconds = self._body_timeout if shared else _LINGER_SECONDS

        async def send_reading(message: Message) -> None:
            """Read on meanwhile, so that hypercorn's queue has room for the news that the client has left."""
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(body.discard)
                await send(message)
                tasks.cancel_scope.cancel()

        async def send_early(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.ended:
                with anyio.move_on_after(_PATIENCE):
                    await body.discard(_LINGER_BYTES)
                headers = list(message["headers"])
                if not body.ended and not shared and _CLOSE not in headers:
                    message["headers"] = [*headers, _CLOSE]
            if body.ended or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send_reading({**message, "more_body": True})
            with anyio.move_on_after(seconds):
                await body.discard(_LINGER_BYTES)
            await send_reading({"type": "http.response.body", "body": b"", "more_body": False})

        if {b"content-length", b"transfer-encoding"} <= dict(scope["headers"]).keys():
            refusal = HTTPError(400, "two_lengths", "Content-Length and Transfer-Encoding must not be sent together")
            await error_response(refusal, {"Connection": "close"})(scope, body.receive, send_early)
        else:
            await self._app(scope, body.receive, send_early)


class _Body:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.ended = False  # or its client has left

    async def receive(self) -> Message:
        message = await self._receive()
        self.ended = self.ended or not message.get("more_body", False)
        return message

    async def discard(self, most: float = float("inf")) -> None:
        """Read to the end of the body, or until more than `most` bytes of it have come."""
        size = 0
        while not self.ended and size <= most:
            size += len((await self.receive()).get("body", b""))

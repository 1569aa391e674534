"""Answers that are given before their request's body has come to its end: refusals, most of them.

A server that stopped reading there would reset the connection, and the client might never see the answer. hypercorn
would do worse: it hands a body over through a short queue, and once that is full and nobody takes from it, the
connection waits for ever, even when its client is long gone.
"""

from __future__ import annotations

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What is spent on the rest of such a body, after the answer has been sent.
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20


class UnreadBodies:
    """Sends an early answer at once, reads on for a while, and only then ends it.

    Over HTTP/1 the connection ends with the answer. Over HTTP/2 it goes on, and hypercorn gives it up with all its
    streams when one that is over gets more: so there it is read for as long as any body may take (`body_timeout`,
    seconds).
    """

    def __init__(self, app: ASGIApp, body_timeout: float) -> None:
        self._app = app
        self._body_timeout = body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive)
        seconds = self._body_timeout if scope["http_version"] == "2" else _LINGER_SECONDS

        async def send_early(message: Message) -> None:
            if body.ended or message["type"] != "http.response.body" or message.get("more_body", False):
                await send(message)
                return
            await send({**message, "more_body": True})
            with anyio.move_on_after(seconds):
                await body.discard(_LINGER_BYTES)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(body.discard)  # what comes while this is sent
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                tasks.cancel_scope.cancel()

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

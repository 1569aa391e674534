"""What becomes of a body that nobody has read when its request is answered.

The answer ends the exchange: a client that is still sending would see a reset instead of it, and the next request
on the same connection would find it closed. So the rest is read first, within bounds, and beyond them the client is
told that the connection ends.
"""

from __future__ import annotations

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 64 * 2**20


class UnreadBodyMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers

        async def read() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and message.get("more_body", False)  # nor is there any more after a disconnect
            return message

        async def discard() -> None:
            size = 0
            with anyio.move_on_after(_LINGER_SECONDS):
                while unread and size <= _LINGER_BYTES:
                    size += len((await read()).get("body", b""))

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                await discard()
                if unread and scope["http_version"].startswith("1"):
                    message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await self._app(scope, read, answer)

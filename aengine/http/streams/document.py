"""The response that waits: one JSON document, sent when the last token is there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aengine.http.engine_like import StreamLike
from aengine.http.hypercorn.in_flight import at_work
from aengine.http.streams.fragments import collect
from aengine.http.streams.slices import document
from aengine.http.streams.sse import body_message
from aengine.types import Completion


class DocumentResponse(Response):
    """Collects the answer, and sends it as one JSON document. However it ends, its request ends in the engine.
    `Response` is the base only because Starlette's handlers return one.
    """

    def __init__(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> None:
        self.background = None
        self._stream = stream
        self._body_of = body_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with at_work(scope, self._stream):
                await self._send(send)
        finally:
            self._stream.abort()

    async def _send(self, send: Send) -> None:
        pieces = document(await self._body_of(await collect(self._stream)))
        length = str(sum(map(len, pieces))).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        *others, last = pieces
        for piece in others:
            await send(body_message(piece))
        await send(body_message(last, more=False))

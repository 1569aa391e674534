"""Whole answers as JSON, encoded in slices so that other tasks run in between. Encoded lists are not copied."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aengine.http.engine_like import StreamLike
from aengine.http.entry.context import context_of
from aengine.http.streams.fragments import SLICE, collect
from aengine.http.streams.sse import body_message
from aengine.types import Completion

T = TypeVar("T")


class EncodedList:
    """A list as JSON, in consecutive pieces. A document may contain it several times."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces


async def encoded_list(items: Sequence[T], body_of: Callable[[T], object], slice_size: int = SLICE) -> EncodedList:
    """Encode `body_of(item)` for each item as a JSON list, in slices."""
    pieces = [b"["]
    for start in range(0, len(items), slice_size):
        encoded = msgspec.json.encode([body_of(item) for item in items[start : start + slice_size]])
        pieces.append(encoded[1:-1] if not start else b"," + encoded[1:-1])
        await asyncio.sleep(0)
    pieces.append(b"]")
    return EncodedList(pieces)


def document(payload: object) -> list[bytes]:
    """Return the payload as JSON, in pieces. Encoded lists in it are not copied."""
    placeholder = secrets.token_hex(16)  # random, so that no text contains it
    lists: list[EncodedList] = []

    def replace_list(value: object) -> str:
        if not isinstance(value, EncodedList):
            raise TypeError(f"{type(value).__name__} in a document")
        lists.append(value)
        return placeholder

    head, *rest = msgspec.json.encode(payload, enc_hook=replace_list).split(b'"%b"' % placeholder.encode())
    pieces = [head]
    for one, after in zip(lists, rest, strict=True):
        pieces += [*one.pieces, after]
    return pieces


class DocumentResponse(Response):
    """Collects the answer and sends it as one JSON document. When the response ends, it aborts the engine's request.

    It derives from `Response` only because Starlette's handlers return one.
    """

    def __init__(self, stream: StreamLike, body_of: Callable[[Completion], Awaitable[object]]) -> None:
        self.background = None
        self._stream = stream
        self._body_of = body_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        context.work = self._stream
        try:
            pieces = document(await self._body_of(await collect(self._stream)))
            length = str(sum(map(len, pieces))).encode()
            headers = [(b"content-length", length), (b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            *others, last = pieces
            for piece in others:
                await send(body_message(piece))
            await send(body_message(last, more=False))
        finally:
            context.work = None
            self._stream.abort()

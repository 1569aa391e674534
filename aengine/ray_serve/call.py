"""One HTTP request to an ASGI application without a connection. The answer is yielded in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Scope

from aengine.http.anthropic.events import MessageEventEncoder
from aengine.http.streams.sse import PING
from aengine.ray_serve.keyed_engine import CALL_PROMPT, CallPrompt

_MAX_WAITING_BYTES = 2**18  # bytes of an answer that may wait for the consumer
_LEAVING_SECONDS = 5.0  # in which the application must end after a disconnect
_PINGS = (PING, MessageEventEncoder.ping)


class Head(msgspec.Struct, frozen=True):
    """Status and headers of an answer, and the part of its body that came with them."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""
    line: int | None = None  # number of the line that carries the rest

    @property
    def is_stream(self) -> bool:
        """Whether the body is server-sent events."""
        return any(name == b"content-type" and b"event-stream" in value for name, value in self.headers)


class FirstToken:
    """Finds the piece of an answer that has its first token. It must see all pieces in their order.

    A stream's first piece has no token: it has the head, and for example a role. Pings may come after it.
    """

    def __init__(self) -> None:
        self._awaited = False

    def is_in(self, piece: Head | bytes) -> bool:
        """Return whether the piece has the first token."""
        if isinstance(piece, Head):
            self._awaited = piece.is_stream
            return bool(piece.body) and not piece.is_stream
        comes, self._awaited = self._awaited and piece not in _PINGS, self._awaited and piece in _PINGS
        return comes


class Call:
    """Runs the application in its own task. If `pieces` is closed, the application sees a disconnect."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, prompt: CallPrompt) -> None:
        self._app = app
        self._scope = scope
        self._body: bytes | None = body
        self._prompt = prompt
        self._head: Message | None = None
        self._waiting: list[bytes] = []
        self._size = 0
        self._piece_ready = asyncio.Event()  # a piece is waiting, or the application has ended
        self._room = asyncio.Event()
        self._room.set()
        self._consumer_left = asyncio.Event()

    async def pieces(self, on_first_token: Callable[[], None]) -> AsyncGenerator[Head | bytes, None]:
        """Yield the head, then the body in pieces.

        on_first_token: called before the piece with the first token: a whole body, or a stream's first piece after its
        head.
        """
        context = copy_context()
        context.run(CALL_PROMPT.set, self._prompt)
        task = asyncio.get_running_loop().create_task(self._run(), context=context)
        try:
            head: Message | None = None
            token = FirstToken()
            while True:
                await self._piece_ready.wait()
                self._piece_ready.clear()
                body, self._waiting, self._size = b"".join(self._waiting), [], 0
                self._room.set()
                if head is None and self._head is not None:
                    head = self._head
                    first = Head(head["status"], [(bytes(n), bytes(v)) for n, v in head["headers"]], body)
                    if token.is_in(first):
                        on_first_token()
                    yield first
                elif body:
                    if token.is_in(body):
                        on_first_token()
                    yield body
                if task.done() and not self._waiting:
                    break
            await task  # raises the application's exception
        finally:
            self._consumer_left.set()
            self._room.set()
            if not task.done():
                await asyncio.wait([task], timeout=_LEAVING_SECONDS)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            asyncio.get_running_loop().call_soon(self._piece_ready.set)  # after the task is done

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._consumer_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return  # it is yielded with the first part of the body
        if body := message.get("body", b""):
            self._waiting.append(bytes(body))
            self._size += len(body)
        self._piece_ready.set()
        if self._size > _MAX_WAITING_BYTES and not self._consumer_left.is_set():
            self._room.clear()
            await self._room.wait()

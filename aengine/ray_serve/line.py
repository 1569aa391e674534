"""A line from a replica to an ingress: one stream that carries the pieces of many answers.

An item of a Ray stream costs both ends some tenths of a millisecond, however small it is. What the rows of one step
bring is therefore put together: while an item is on its way, what comes next waits for the one after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from aengine.http.door.errors import HTTPError
from aengine.sizes import format_bytes

_ENOUGH = 2**20  # bytes that may wait for the next item
_IDLE_SECONDS = 1.0  # without a call; a replica that is to go waits for its lines to end
_BEHIND = 2**22  # bytes of one answer that may wait for its client

_END = 0  # after the last piece of a call
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int | bytes]]).decode


class LineBrokenError(Exception):
    """The line is no more."""


class LineOut:
    """The replica's end."""

    def __init__(self, number: int) -> None:
        self.number = number  # by which the ingress tells its lines apart
        self.open = True
        self._calls = 0
        self._waiting: list[tuple[int, int | bytes]] = []
        self._size = 0
        self._there = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def begin(self) -> None:
        """Count a call in: the line stays open for it."""
        self._calls += 1

    async def put(self, call: int, piece: bytes) -> None:
        """Send a piece of a call's answer, once there is room for it. Lost where the line is no longer open."""
        if not self.open:
            return
        self._waiting.append((call, piece))
        self._size += len(piece)
        self._there.set()
        if self._size > _ENOUGH:
            self._room.clear()
            await self._room.wait()

    def end(self, call: int) -> None:
        """Say that a call has no more pieces, and count it out."""
        self._calls -= 1
        self._waiting.append((call, _END))
        self._there.set()

    async def batches(self) -> AsyncGenerator[bytes, None]:
        """What there is to send, until there has been no call for a while; at first nothing: the line is open."""
        try:
            yield _encode([])
            while True:
                try:
                    async with asyncio.timeout(_IDLE_SECONDS):
                        await self._there.wait()
                except TimeoutError:
                    if self._calls or self._waiting:
                        continue
                    return
                self._there.clear()
                batch, self._waiting, self._size = self._waiting, [], 0
                self._room.set()
                yield _encode(batch)
        finally:
            self.open = False
            self._room.set()


class Inbox:
    """The pieces of one call at the ingress."""

    __slots__ = ("_ended", "_error", "_pieces", "_size", "_there")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: Exception | None = None
        self._there = asyncio.Event()

    def put(self, piece: int | bytes) -> None:
        """Take a piece, or the end, from the line."""
        if isinstance(piece, int):
            self._ended = True
        else:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size > _BEHIND:
                self._error = HTTPError(
                    408, "reader_timeout", f"{format_bytes(self._size)} of the answer were not read"
                )
        self._there.set()

    def break_off(self) -> None:
        """Let the call fail, unless all of it is here: its line is no more."""
        self._error = self._error or LineBrokenError()
        self._there.set()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """All that comes, together what is there together. Raises `LineBrokenError`, or `HTTPError` if its reader is
        too far behind.
        """
        while True:
            await self._there.wait()
            self._there.clear()
            if self._pieces:
                pieces, self._pieces, self._size = self._pieces, [], 0
                yield b"".join(pieces)
            elif self._ended:
                return
            elif self._error is not None:
                raise self._error
            if self._ended or self._error is not None:
                self._there.set()


def deliver(batch: bytes, inboxes: dict[int, Inbox]) -> None:
    """Hand a batch's pieces to their calls; those of a call that is no more are dropped."""
    for call, piece in _decode(batch):
        inbox = inboxes.get(call)
        if inbox is not None:
            inbox.put(piece)

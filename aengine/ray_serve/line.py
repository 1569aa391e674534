"""Lines from replicas to an ingress: one stream each, which carries the pieces of many answers.

An item of a Ray stream costs both ends some tenths of a millisecond, however small it is. What the rows of one step
bring is therefore put together: while an item is on its way, what comes next waits for the one after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio
import msgspec
from anyio.abc import TaskGroup

from aengine.http.door.errors import HTTPError
from aengine.sizes import format_bytes

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_log = logging.getLogger("aengine")

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


class Line:
    """A replica as the ingress sees it: the calls that it answers, and the line to it."""

    __slots__ = ("calls", "followers", "number", "replica")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.calls: set[int] = set()
        self.number: int | None = None  # of the line that is open, or being opened
        self.followers: set[int] = set()  # calls whose answers take it


class Lines:
    """Opens a line where a second call is being answered by one replica: of a single one nothing could be put together.

    Which way a stream takes is the replica's choice: it knows when the line is there.
    """

    def __init__(self, handle: DeploymentHandle[Any], name: str, open_timeout: float) -> None:
        self._handle = handle
        self._name = name
        self._open_timeout = open_timeout
        self._numbers = count()
        self._inboxes: dict[int, Inbox] = {}  # by call
        self._lines: dict[str, Line] = {}  # by replica
        self._to_open: asyncio.Queue[Line] = asyncio.Queue()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._stack.callback(tasks.cancel_scope.cancel)
        tasks.start_soon(self._open_lines, tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def register(self) -> tuple[int, Inbox]:
        """The number of a new call, and where its pieces arrive if they take a line."""
        call, inbox = next(self._numbers), Inbox()
        self._inboxes[call] = inbox
        return call, inbox

    def enter(self, replica: str, call: int) -> Line:
        """Note that a replica has taken the call up."""
        line = self._lines.setdefault(replica, Line(replica))
        line.calls.add(call)
        if len(line.calls) > 1 and line.number is None:
            line.number = next(self._numbers)
            self._to_open.put_nowait(line)
        return line

    def follow(self, line: Line, call: int, number: int) -> None:
        """Note that the rest of the call's answer comes by the line of this number."""
        if line.number == number:
            line.followers.add(call)
        else:
            self._inboxes[call].break_off()  # that line is no more

    def leave(self, line: Line | None, call: int) -> None:
        """Forget a call; what still comes of it is dropped."""
        del self._inboxes[call]
        if line is not None:
            line.calls.discard(call)
            line.followers.discard(call)
            self._drop(line)

    async def _open_lines(self, tasks: TaskGroup) -> None:
        # Here rather than where a call asks for it: what is sent from a request's context Ray cancels with the request.
        while True:
            tasks.start_soon(self._run, await self._to_open.get())

    async def _run(self, line: Line) -> None:
        stream = self._handle.remote(router=self._name, number=line.number, to=line.replica)
        try:
            with anyio.fail_after(self._open_timeout):
                await anext(stream)
            async for batch in stream:
                deliver(batch, self._inboxes)
        except Exception as error:  # noqa: BLE001  # Ray has many words for an actor that is no more
            _log.info("the line to replica %s broke: %s", line.replica, type(error).__name__)
        finally:
            stream.cancel()
            line.number = None
            for call in line.followers:
                self._inboxes[call].break_off()
            line.followers.clear()
            self._drop(line)

    def _drop(self, line: Line) -> None:
        if not line.calls and line.number is None and self._lines.get(line.replica) is line:
            del self._lines[line.replica]

"""Lines from replicas to an ingress. A line is one Ray stream that carries the pieces of many answers.

An item of a Ray stream costs both ends some tenths of a millisecond, whatever its size. The pieces of one step are
therefore sent together: while an item is under way, new pieces wait for the next one.
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

from aengine.http.entry.errors import HTTPError
from aengine.sizes import format_bytes

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

_log = logging.getLogger("aengine")

_MAX_WAITING_BYTES = 2**20  # bytes that may wait for the next item
_IDLE_SECONDS = 1.0  # a line without calls ends after this time; a draining replica waits for it
_MAX_UNREAD_BYTES = 2**22  # bytes of one answer that may wait for its client

_END = 0  # after the last piece of a call
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[int, int | bytes]]).decode


class LineBrokenError(Exception):
    """The line has ended before the answer did."""


class LineOut:
    """The sending end, at the replica."""

    def __init__(self, number: int) -> None:
        self.number = number  # given by the ingress
        self.open = True
        self._calls = 0
        self._waiting: list[tuple[int, int | bytes]] = []
        self._size = 0
        self._piece_ready = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    def begin(self) -> None:
        """Count a call. The line stays open for it."""
        self._calls += 1

    async def put(self, call: int, piece: bytes) -> None:
        """Send a piece of a call's answer when there is room. The piece is dropped if the line has ended."""
        if not self.open:
            return
        self._waiting.append((call, piece))
        self._size += len(piece)
        self._piece_ready.set()
        if self._size > _MAX_WAITING_BYTES:
            self._room.clear()
            await self._room.wait()

    def end(self, call: int) -> None:
        """Send the end of a call's answer, and count the call no longer."""
        self._calls -= 1
        self._waiting.append((call, _END))
        self._piece_ready.set()

    async def batches(self) -> AsyncGenerator[bytes, None]:
        """Yield batches of pieces until the line has had no calls for a while. The first one is empty."""
        try:
            yield _encode([])
            while True:
                try:
                    async with asyncio.timeout(_IDLE_SECONDS):
                        await self._piece_ready.wait()
                except TimeoutError:
                    if self._calls or self._waiting:
                        continue
                    return
                self._piece_ready.clear()
                batch, self._waiting, self._size = self._waiting, [], 0
                self._room.set()
                yield _encode(batch)
        finally:
            self.open = False
            self._room.set()


class Inbox:
    """The receiving end of one call, at the ingress."""

    __slots__ = ("_ended", "_error", "_piece_ready", "_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._ended = False
        self._error: Exception | None = None
        self._piece_ready = asyncio.Event()

    def put(self, piece: int | bytes) -> None:
        """Add a piece from the line, or the end."""
        if isinstance(piece, int):
            self._ended = True
        else:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size > _MAX_UNREAD_BYTES:
                self._error = HTTPError(
                    408, "reader_timeout", f"{format_bytes(self._size)} of the answer were not read"
                )
        self._piece_ready.set()

    def fail(self) -> None:
        """Make the call fail with `LineBrokenError`, unless its answer is complete."""
        self._error = self._error or LineBrokenError()
        self._piece_ready.set()

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the answer. Pieces that wait together are joined.

        Raises `LineBrokenError`, or `HTTPError` if the client is too far behind.
        """
        while True:
            await self._piece_ready.wait()
            self._piece_ready.clear()
            if self._pieces:
                pieces, self._pieces, self._size = self._pieces, [], 0
                yield b"".join(pieces)
            elif self._ended:
                return
            elif self._error is not None:
                raise self._error
            if self._ended or self._error is not None:
                self._piece_ready.set()


def deliver(batch: bytes, inboxes: dict[int, Inbox]) -> None:
    """Give a batch's pieces to their calls. Pieces of calls that have left are dropped."""
    for call, piece in _decode(batch):
        inbox = inboxes.get(call)
        if inbox is not None:
            inbox.put(piece)


class Line:
    """A replica at the ingress: the calls that it answers, and the line from it."""

    __slots__ = ("calls", "followers", "number", "replica")

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.calls: set[int] = set()
        self.number: int | None = None  # of the open line, also while it is being opened
        self.followers: set[int] = set()  # calls whose answers come by it


class Lines:
    """The ingress' lines. A line is opened when a replica answers a second call, since one call alone gains nothing.

    The replica decides whether a stream takes the line, because it knows whether the line is open.
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
        """Return the number of a new call, and its inbox for pieces that come by a line."""
        call, inbox = next(self._numbers), Inbox()
        self._inboxes[call] = inbox
        return call, inbox

    def enter(self, replica: str, call: int) -> Line:
        """Note that a replica has accepted the call."""
        line = self._lines.setdefault(replica, Line(replica))
        line.calls.add(call)
        if len(line.calls) > 1 and line.number is None:
            line.number = next(self._numbers)
            self._to_open.put_nowait(line)
        return line

    def follow(self, line: Line, call: int, number: int) -> None:
        """Note that the rest of the call's answer comes by the line with this number."""
        if line.number == number:
            line.followers.add(call)
        else:
            self._inboxes[call].fail()  # that line has ended

    def leave(self, line: Line | None, call: int) -> None:
        """Forget a call. Its further pieces are dropped."""
        del self._inboxes[call]
        if line is not None:
            line.calls.discard(call)
            line.followers.discard(call)
            self._drop(line)

    async def _open_lines(self, tasks: TaskGroup) -> None:
        # A task of its own opens them: Ray cancels calls made within a request when that request ends.
        while True:
            tasks.start_soon(self._run, await self._to_open.get())

    async def _run(self, line: Line) -> None:
        stream = self._handle.remote(router=self._name, number=line.number, to=line.replica)
        try:
            with anyio.fail_after(self._open_timeout):
                await anext(stream)
            async for batch in stream:
                deliver(batch, self._inboxes)
        except Exception as error:  # noqa: BLE001  # Ray raises many types for a dead actor
            _log.info("the line to replica %s broke: %s", line.replica, type(error).__name__)
        finally:
            stream.cancel()
            line.number = None
            for call in line.followers:
                self._inboxes[call].fail()
            line.followers.clear()
            self._drop(line)

    def _drop(self, line: Line) -> None:
        if not line.calls and line.number is None and self._lines.get(line.replica) is line:
            del self._lines[line.replica]

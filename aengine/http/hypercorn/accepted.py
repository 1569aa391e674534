"""Bounds the number of accepted connections, drops idle ones first, and closes those whose client is gone at once."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from starlette.types import Send

from aengine.http.hypercorn.crowd import Crowd, give_back_memory

_CLOSING = 60.0  # seconds that a client may take for what it has not yet read
_RESERVED = 256  # descriptors for everything else, or a quarter of them
_LOOK = 1.0  # seconds between two looks at the clients of busy connections
_ESTABLISHED = 1  # of Linux' states of a TCP connection


def connection_of(send: Send) -> tuple[H11Protocol, HTTPStream, TCPServer] | None:
    """Return the protocol, the stream and the connection that `send` writes to; None if they are not hypercorn's."""
    stream = getattr(send, "__self__", None)
    protocol = getattr(stream.send, "__self__", None) if isinstance(stream, HTTPStream) else None
    server = getattr(protocol.send, "__self__", None) if isinstance(protocol, H11Protocol) else None
    if not (isinstance(stream, HTTPStream) and isinstance(protocol, H11Protocol) and isinstance(server, TCPServer)):
        return None
    return protocol, stream, server


def reset_connection(send: Send) -> bool:
    """Drop what is still to be sent and end the connection; returns whether that was done.

    It is not done if the connection is no longer open or not hypercorn's. hypercorn would close a connection as well
    when its response ends unfinished, but only once all that waits has been read.
    """
    if (found := connection_of(send)) is None:
        return False
    writer = found[2].writer
    raw = writer.get_extra_info("socket")
    if raw is None or raw.fileno() == -1:  # its client has reset it
        return False
    with suppress(OSError):  # what the kernel holds is dropped as well
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return True


class OpenConnections:
    """The open connections of this process, at most `most`: a new one takes the place of the one that is idle for
    longest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._crowd = Crowd(give_back_memory)
        self._open: set[AcceptedConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # whose the timer is
        self.idle: dict[AcceptedConnection, None] = {}  # the oldest first

    @property
    def count(self) -> int:
        return len(self._open)

    def enter(self, connection: AcceptedConnection) -> bool:
        """Take a place, if need be that of an idle connection; whether there was one."""
        if self.count >= self._most:
            oldest = next(iter(self.idle), None)
            if oldest is None:
                return False
            del self.idle[oldest]
            oldest.writer.transport.abort()
        self._open.add(connection)
        self._crowd.grew(self.count)
        loop = asyncio.get_running_loop()
        if sys.platform == "linux" and (self._timer is None or self._loop is not loop):
            self._timer, self._loop = loop.call_later(_LOOK, self._look), loop
        return True

    def leave(self, connection: AcceptedConnection) -> None:
        self._open.discard(connection)
        self._crowd.shrank(self.count)

    def _look(self) -> None:
        """Let go the busy connections whose clients have left: one timer for all of them, which ends with the last."""
        for connection in self._open - self.idle.keys():
            connection.look()
        self._timer = asyncio.get_running_loop().call_later(_LOOK, self._look) if self._open else None


class AcceptedConnection(TCPServer):
    """hypercorn's connection, closed as soon as its client is gone: hypercorn's own would outlive it until
    `keep_alive_timeout`, and one that does not read for ever.
    """

    def __init__(self, connections: OpenConnections, *args: Any) -> None:
        super().__init__(*args)
        self._connections = connections
        self._gone = False  # its client
        self._abort: asyncio.TimerHandle | None = None
        self._reading = anyio.CancelScope()

    async def run(self) -> None:
        if not self._connections.enter(self):
            self.writer.transport.abort()
            return
        try:
            await super().run()
        finally:
            self._connections.leave(self)
            if self._abort is not None:
                self._abort.cancel()

    def look(self) -> None:
        """Stop reading where the client has left, or has said that it sends no more. What closes already is bounded.

        What it had sent behind its request is never answered: hypercorn takes it up only once it has answered the
        request, and does not hear before that that nobody waits for it.
        """
        if self._abort is not None:
            return
        left = self.writer.transport.is_closing()
        with suppress(OSError):  # a Unix socket
            raw = self.writer.get_extra_info("socket")
            left = left or raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED
        if left:
            self._reading.cancel()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData) and self.writer.transport.is_closing():
            if self._abort is None:
                self._reading.cancel()
            await self.protocol.handle(Closed())
        else:
            await super().protocol_send(event)

    async def _read_data(self) -> None:
        try:
            with self._reading:
                await super()._read_data()
            if self._reading.cancelled_caught:
                await self.protocol.handle(Closed())
        finally:
            self._gone = True
            await self.idle_task.stop()  # else it is waited for

    async def _idle_timeout(self) -> None:
        if self._gone:
            return
        self._connections.idle[self] = None
        try:
            await super()._idle_timeout()
        finally:
            self._connections.idle.pop(self, None)

    async def _initiate_server_close(self) -> None:
        self._abort_in_time()
        await super()._initiate_server_close()

    async def _close(self) -> None:
        self._abort_in_time()
        await super()._close()

    def _abort_in_time(self) -> None:
        if self._abort is None:
            self._abort = self.loop.call_later(_CLOSING, self.writer.transport.abort)


def chunked(send: Send) -> tuple[h11.Connection, Callable[[RawData], Awaitable[None]]] | None:
    """Under an answer over HTTP/1.1 that has begun and comes in chunks: its connection, and what writes to that.

    Chunks but the last may be written there, as long as the connection's own state is `h11.SEND_BODY`: for each,
    hypercorn and h11 make two dozen calls, none of which changes anything.
    """
    if (found := connection_of(send)) is None:
        return None
    protocol, stream, server = found
    connection = protocol.connection
    if not (isinstance(connection, h11.Connection) and isinstance(server, AcceptedConnection)):
        return None
    response, method = stream.response, stream.scope["method"]
    if method == "HEAD" or response["status"] in (204, 304) or b"content-length" in dict(response["headers"]):
        return None
    # hypercorn's own, which is to be called for every token of everybody: a stream ends with the first that fails.
    write = partial(TCPServer.protocol_send, server)
    return (connection, write) if connection.their_http_version == b"1.1" else None


def most_connections() -> int:
    """The bound on connections: this process's limit of descriptors, less some for itself."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files - min(_RESERVED, files // 4)

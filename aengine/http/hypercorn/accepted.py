"""Bounds the number of connections, drops idle ones first, and closes a connection as soon as its client has left."""

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

from aengine.http.hypercorn.memory import MemoryReleaser, return_memory

_CLOSING = 60.0  # seconds for a client to read buffered data before its connection is closed
# File descriptors for other uses, at most half of all. Each pass of the loop accepts up to 100 connections under bare
# hypercorn. Those above the bound are closed in the next pass, which accepts as many again.
_RESERVED = 256
_POLL = 1.0  # seconds between two checks of busy connections
_ESTABLISHED = 1  # a TCP connection's state, on Linux
_SILENCE = 2.0  # seconds without data, after which a connection with an unfinished body may be replaced
_TCP_INFO_BYTES = 56  # of Linux' tcp_info, which are read
_LAST_RECEIVED = 52  # the place of its field tcpi_last_data_recv, in milliseconds


def connection_of(send: Send) -> tuple[H11Protocol, HTTPStream, TCPServer] | None:
    """Return the protocol, the stream and the connection below `send`; None if they are not hypercorn's.

    ASGI does not give access to the connection, so hypercorn's own objects are followed.
    """
    stream = getattr(send, "__self__", None)
    protocol = getattr(stream.send, "__self__", None) if isinstance(stream, HTTPStream) else None
    server = getattr(protocol.send, "__self__", None) if isinstance(protocol, H11Protocol) else None
    if not (isinstance(stream, HTTPStream) and isinstance(protocol, H11Protocol) and isinstance(server, TCPServer)):
        return None
    return protocol, stream, server


def reset_connection(send: Send) -> bool:
    """Drop unsent data and close the connection. Returns False if it is not open or not hypercorn's.

    hypercorn itself closes a connection with an unfinished response only after the client has read all buffered data.
    """
    if (found := connection_of(send)) is None:
        return False
    writer = found[2].writer
    raw = writer.get_extra_info("socket")
    if raw is None or raw.fileno() == -1:  # the client has reset it
        return False
    with suppress(OSError):  # this drops the kernel's buffer as well
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return True


class OpenConnections:
    """The open connections of this process, at most `most`. A new one replaces the one that is idle for longest.

    If none is idle, it replaces one whose body has stalled, so that half bodies never keep others out for long.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._memory = MemoryReleaser(return_memory)
        self._open: set[AcceptedConnection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the timer
        self.idle: dict[AcceptedConnection, None] = {}  # the oldest first
        self.stalled: dict[AcceptedConnection, None] = {}  # whose body stopped arriving; the oldest first

    @property
    def count(self) -> int:
        return len(self._open)

    def enter(self, connection: AcceptedConnection) -> bool:
        """Add a connection, if necessary in place of an idle one. Returns False if there is no room."""
        if self.count >= self._most:
            oldest = next(iter(self.idle or self.stalled), None)
            if oldest is None:
                return False
            self._forget(oldest)
            oldest.writer.transport.abort()
        self._open.add(connection)
        self._memory.grew(self.count)
        loop = asyncio.get_running_loop()
        if sys.platform == "linux" and (self._timer is None or self._loop is not loop):
            self._timer, self._loop = loop.call_later(_POLL, self._poll), loop
        return True

    def leave(self, connection: AcceptedConnection) -> None:
        self._open.discard(connection)
        self._forget(connection)
        self._memory.shrank(self.count)

    def _forget(self, connection: AcceptedConnection) -> None:
        self.idle.pop(connection, None)
        self.stalled.pop(connection, None)

    def _poll(self) -> None:
        """Close the busy connections whose clients have left. One timer serves all connections."""
        for connection in self._open - self.idle.keys():
            if not connection.poll():
                self.stalled.pop(connection, None)
            elif connection not in self.stalled:
                self.stalled[connection] = None
        self._timer = asyncio.get_running_loop().call_later(_POLL, self._poll) if self._open else None


class AcceptedConnection(TCPServer):
    """hypercorn's connection, closed as soon as its client has left.

    hypercorn's own connection would stay open until `keep_alive_timeout`, or for ever if the client does not read.
    """

    def __init__(self, connections: OpenConnections, *args: Any) -> None:
        super().__init__(*args)
        self._connections = connections
        self._gone = False  # whether its client has left
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

    def poll(self) -> bool:
        """Stop reading if the client has left or has closed its side. A connection that is closing is not checked.

        Requests that the client has pipelined are not answered then. hypercorn would answer them after this one, and
        would notice only then that the client has left.

        Returns whether the client has stopped sending before the end of a body.
        """
        if self._abort is not None:
            return False
        left, silence = self.writer.transport.is_closing(), 0.0
        with suppress(OSError):  # a Unix socket has no TCP state
            raw = self.writer.get_extra_info("socket")
            info = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            left = left or info[0] != _ESTABLISHED
            silence = struct.unpack_from("I", info, _LAST_RECEIVED)[0] / 1000
        if left:
            self._reading.cancel()
        return silence >= _SILENCE and not left and self._awaits_body

    @property
    def _awaits_body(self) -> bool:
        """Whether a request's body is unfinished, and not answered yet."""
        protocol = getattr(self, "protocol", None)  # none at first
        protocol = getattr(protocol, "protocol", protocol)  # hypercorn's own wrapper, if nothing has replaced it
        if not (isinstance(protocol, H11Protocol) and isinstance(protocol.connection, h11.Connection)):
            return False
        states = protocol.connection.states
        return states == {h11.CLIENT: h11.SEND_BODY, h11.SERVER: h11.SEND_RESPONSE}

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
            await self.idle_task.stop()  # else hypercorn waits for it

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
    """Return the h11 connection of a chunked answer that has begun, and a function that writes to it.

    All chunks but the last may be written with it while the connection's state is `h11.SEND_BODY`. This skips two
    dozen calls of hypercorn and h11 for each chunk, which change nothing. None if the answer is not chunked.
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
    # hypercorn's own method, without our check: it runs for every token, and the first failing write ends the stream.
    write = partial(TCPServer.protocol_send, server)
    return (connection, write) if connection.their_http_version == b"1.1" else None


def most_connections() -> int:
    """Return the bound on connections: this process's limit of file descriptors, less a reserve."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files - min(_RESERVED, files // 2)

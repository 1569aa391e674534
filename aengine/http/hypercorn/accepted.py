"""Bounds the number of accepted connections, drops idle ones first, and closes those whose client is gone at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from starlette.types import Send

from aengine.http.hypercorn.crowd import Crowd, give_back_memory

_CLOSING = 60.0  # seconds that a client may take for what it has not yet read
_RESERVED = 256  # descriptors for everything else, or a quarter of them


class OpenConnections:
    """The open connections of this process, at most `most`: a new one takes the place of the one that is idle for
    longest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._crowd = Crowd(give_back_memory)
        self.count = 0
        self.idle: dict[AcceptedConnection, None] = {}  # the oldest first

    def enter(self) -> bool:
        """Take a place, if need be that of an idle connection; whether there was one."""
        if self.count >= self._most:
            oldest = next(iter(self.idle), None)
            if oldest is None:
                return False
            del self.idle[oldest]
            oldest.writer.transport.abort()
        self.count += 1
        self._crowd.grew(self.count)
        return True

    def leave(self) -> None:
        self.count -= 1
        self._crowd.shrank(self.count)


class AcceptedConnection(TCPServer):
    """hypercorn's connection, closed as soon as its client is gone: hypercorn's own would outlive it until
    `keep_alive_timeout`, and one that does not read for ever.
    """

    def __init__(self, connections: OpenConnections, *args: Any) -> None:
        super().__init__(*args)
        self._connections = connections
        self._gone = False  # its client
        self._abort: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        if not self._connections.enter():
            self.writer.transport.abort()
            return
        try:
            await super().run()
        finally:
            self._connections.leave()
            if self._abort is not None:
                self._abort.cancel()

    async def _read_data(self) -> None:
        try:
            await super()._read_data()
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
    stream = getattr(send, "__self__", None)
    if not isinstance(stream, HTTPStream):
        return None
    protocol = getattr(stream.send, "__self__", None)
    connection = protocol.connection if isinstance(protocol, H11Protocol) else None
    server = getattr(protocol.send, "__self__", None) if isinstance(protocol, H11Protocol) else None
    if not (isinstance(connection, h11.Connection) and isinstance(server, AcceptedConnection)):
        return None
    response, method = stream.response, stream.scope["method"]
    names = {name.lower() for name, _ in response["headers"]}
    if method == "HEAD" or response["status"] in (204, 304) or b"content-length" in names:
        return None
    return (connection, server.protocol_send) if connection.their_http_version == b"1.1" else None


def most_connections() -> int:
    """The bound on connections: this process's limit of descriptors, less some for itself."""
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if files == resource.RLIM_INFINITY else files - min(_RESERVED, files // 4)

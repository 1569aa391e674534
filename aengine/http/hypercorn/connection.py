"""Access to the connection under a response through hypercorn's own objects, because ASGI does not name it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.protocol.h2 import BUFFER_HIGH_WATER, H2Protocol
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from priority.priority import MissingStreamError
from starlette.types import Send


def connection_of(send: Send) -> H11Protocol | H2Protocol | None:
    """The protocol that `send` writes to, if that is hypercorn's: over HTTP/2 several responses share one."""
    stream = getattr(send, "__self__", None)
    protocol = getattr(stream.send, "__self__", None) if isinstance(stream, HTTPStream) else None
    return protocol if isinstance(protocol, H11Protocol | H2Protocol) else None


async def room_to_send(send: Send) -> None:
    """Over HTTP/2, wait until the stream's buffer has room.

    hypercorn means to wait as well, but a window that is used up wakes it: it would take in the whole answer.
    """
    stream, protocol = getattr(send, "__self__", None), connection_of(send)
    if isinstance(stream, HTTPStream) and isinstance(protocol, H2Protocol):
        waiting = protocol.stream_buffers.get(stream.stream_id)
        if waiting is not None and len(waiting.buffer) >= BUFFER_HIGH_WATER:
            await waiting.drain()


async def reset_connection(send: Send, others_progress: bool) -> bool:
    """Drop what is still to be sent and end the connection; returns whether that was done.

    It is not where the connection is no longer open or not hypercorn's. Over HTTP/2 the stream alone is reset; but if
    the connection takes nothing, neither of this stream nor of others, it is ended there too. hypercorn would close an
    HTTP/1 connection as well when its response ends unfinished, but only once all that waits has been read.
    """
    stream, protocol = getattr(send, "__self__", None), connection_of(send)
    server = getattr(protocol.send, "__self__", None) if protocol is not None else None
    if not isinstance(server, TCPServer) or not isinstance(stream, HTTPStream):
        return False
    if isinstance(protocol, H2Protocol) and (others_progress or not server.send_lock.locked()):
        await _reset_stream(protocol, server, stream.stream_id)
        return False
    raw = server.writer.get_extra_info("socket")
    if raw is None or raw.fileno() == -1:  # its client has reset it
        return False
    with suppress(OSError):  # what the kernel holds is dropped as well
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.writer.transport.abort()
    return True


async def _reset_stream(protocol: H2Protocol, server: TCPServer, stream_id: int) -> None:
    """Reset the stream without waiting for anything: the watch of all readers is what calls this."""
    with suppress(ProtocolError, MissingStreamError):  # it has ended
        protocol.connection.reset_stream(stream_id, ErrorCodes.CANCEL)
        server.writer.write(protocol.connection.data_to_send())
        if (waiting := protocol.stream_buffers.get(stream_id)) is not None:
            await waiting.close()  # hypercorn's own sender then forgets the stream
        protocol.priority.unblock(stream_id)
        await protocol.has_data.set()

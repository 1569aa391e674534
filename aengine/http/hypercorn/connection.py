"""Access to the connection under a response through hypercorn's own objects, because ASGI does not name it."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from starlette.types import Send


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

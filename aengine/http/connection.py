"""The connection under a response: reset at once where closing it would wait for a reader that does not read."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from starlette.types import Send


def reset_connection(send: Send) -> bool:
    """Drop what is still to be sent and end the connection; False unless it is open, HTTP/1 and hypercorn's.

    ASGI has no word for this. hypercorn would close the connection too when its response ends unfinished, but only
    once all that waits has been read.
    """
    stream = getattr(send, "__self__", None)
    protocol = getattr(stream.send, "__self__", None) if isinstance(stream, HTTPStream) else None
    server = getattr(protocol.send, "__self__", None) if isinstance(protocol, H11Protocol) else None
    if not isinstance(server, TCPServer):
        return False
    raw = server.writer.get_extra_info("socket")
    if raw is None or raw.fileno() == -1:  # its client has reset it
        return False
    with suppress(OSError):  # what the kernel holds is dropped as well
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.writer.transport.abort()
    return True

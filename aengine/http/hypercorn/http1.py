"""hypercorn's HTTP/1.1 protocol without its upgrades to HTTP/2 and WebSocket."""

from __future__ import annotations

import struct
from typing import Any

import h11
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

_SPOKEN = b"this server speaks HTTP/1.1 alone"
_SETTINGS, _GOAWAY, _HTTP_1_1_REQUIRED = 4, 7, 13  # RFC 9113


def _frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


# The refusal in HTTP/2: no stream was processed (0), and the reason.
_REFUSAL = _frame(_SETTINGS) + _frame(_GOAWAY, struct.pack(">II", 0, _HTTP_1_1_REQUIRED) + _SPOKEN)


class Http1Protocol(H11Protocol):
    """hypercorn's protocol without upgrades: every request is treated as an ordinary one.

    So the application answers each request, and its connection closes or idles afterwards. hypercorn itself does not
    close a connection whose WebSocket handshake it has refused. A client that begins with HTTP/2's preface gets a
    refusal in HTTP/2. This class replaces hypercorn's `ProtocolWrapper`, which chooses between HTTP/1.1 and HTTP/2.
    """

    def __init__(self, *args: Any) -> None:
        *own, _alpn = args
        super().__init__(*own)
        self._refused = False  # further data is not read

    async def handle(self, event: Event) -> None:
        if not (self._refused and isinstance(event, RawData)):
            await super().handle(event)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Keep the connection in HTTP/1.1; hypercorn would switch to HTTP/2 here."""

    async def _create_stream(self, request: h11.Request) -> None:
        if request.method == b"PRI":
            self._refused = True
            await self.send(RawData(_REFUSAL))
            await self.send(Closed())
            return
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1
        await self.context.mark_request()

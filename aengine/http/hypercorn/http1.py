"""hypercorn's HTTP/1.1 protocol without its two ways out of it, HTTP/2 and WebSocket."""

from __future__ import annotations

from typing import Any

import h11
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream


class Http1Protocol(H11Protocol):
    """hypercorn's protocol, but every request is an ordinary one, whatever it asks to upgrade to, in whatever version.

    So each is refused or answered by the application, and its connection ends or is idle after that. hypercorn never
    ends the connection of a WebSocket handshake that it refuses by itself. It takes the place of hypercorn's
    `ProtocolWrapper`, which chooses between this protocol and HTTP/2's.
    """

    def __init__(self, *args: Any) -> None:
        *own, _alpn = args
        super().__init__(*own)

    async def _check_protocol(self, event: h11.Request) -> None:
        """Leave the connection to HTTP/1.1: hypercorn would hand it over to HTTP/2 here."""

    async def _create_stream(self, request: h11.Request) -> None:
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

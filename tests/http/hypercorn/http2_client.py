"""One HTTP/2 connection by prior knowledge: what it sends, frame by frame, and what it has heard."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, DataReceived, Event, ResponseReceived, StreamEnded, StreamReset


class Http2Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.bodies: dict[int, bytes] = {}
        self.statuses: dict[int, int] = {}
        self.ended: set[int] = set()
        self.resets: dict[int, int] = {}  # stream: error code
        self.goaway: int | None = None  # error code
        self.closed = False

    def open(self, path: str = "/", method: str = "POST", *, end: bool = False) -> int:
        stream = self.h2.get_next_available_stream_id()
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "a")]
        self.h2.send_headers(stream, headers, end_stream=end)
        return stream

    def cancel(self, stream: int) -> None:
        self.h2.reset_stream(stream, ErrorCodes.CANCEL)

    async def send(self, frames: bytes = b"") -> None:
        """What `h2` has made so far, and these."""
        self._writer.write(self.h2.data_to_send() + frames)
        await self._writer.drain()

    async def read_until(self, done: Callable[[], object], on_event: Callable[[Event], None] | None = None) -> None:
        """Send, and hear until so, or until the connection is closed."""
        await self.send()
        async with asyncio.timeout(30):
            while not self.closed and not done():
                try:
                    data = await self._reader.read(2**16)
                except ConnectionError:
                    data = b""
                self.closed = not data
                for event in self.h2.receive_data(data):
                    self._note(event)
                    if on_event is not None:
                        on_event(event)
                if self.goaway is None:
                    await self.send()

    def _note(self, event: Event) -> None:
        match event:
            case ResponseReceived(stream_id=int(stream)):
                self.statuses[stream] = int(dict(event.headers or ())[":status"])
            case DataReceived(stream_id=int(stream)):
                self.bodies[stream] = self.bodies.get(stream, b"") + event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length or 0, stream)
            case StreamEnded(stream_id=int(stream)):
                self.ended.add(stream)
            case StreamReset(stream_id=int(stream)):
                self.resets[stream] = int(event.error_code or 0)
            case ConnectionTerminated():
                self.goaway = int(event.error_code or 0)


@asynccontextmanager
async def http2_client(port: int, *, settings: bool = True) -> AsyncIterator[Http2Client]:
    """A client; without `settings` it has sent nothing, neither the preface nor its SETTINGS."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        client = Http2Client(reader, writer)
        if settings:
            await client.send()
        else:
            client.h2.clear_outbound_data_buffer()
        yield client
    finally:
        writer.close()


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

"""hypercorn's HTTP/2 protocol with bounds on what a client's frames may cost the event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import anyio
from h2.errors import ErrorCodes
from h2.events import DataReceived, PriorityUpdated, RequestReceived, StreamReset
from h2.events import Event as FrameEvent
from h2.exceptions import ProtocolError
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol

from aengine.http.door.turnstile import Turnstile
from aengine.http.hypercorn.frame_budget import FrameBudget
from aengine.http.hypercorn.frames import FrameSlices, Slice

_log = logging.getLogger(__name__)

_ENDED = "a client's connection was ended"
_LINGER = 1.0  # seconds for the client to read why it is sent away; closed at once, what it still sends would reset it


class BoundedH2(H2Protocol):
    """hypercorn's protocol, but it takes few frames in one pass of the event loop, and ends a connection that sends too
    many that bring nothing.

    A stream that is reset in the slice that opens it never begins. PRIORITY is ignored: RFC 9113 deprecates it, and
    hypercorn keeps a tree of the streams that it names.
    """

    def __init__(self, turns: Turnstile, *args: Any) -> None:
        super().__init__(*args)
        self._turns = turns  # shared by all connections: the full slices of one pass
        self._slices = FrameSlices(self.connection.max_inbound_frame_size)
        self._budget = FrameBudget()
        self._with_body: set[int] = set()  # streams whose answers have had a part of a body
        self._left = asyncio.Event()  # the client has

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        await super().initiate(headers, settings)
        if headers is None:  # hypercorn has taken the preface for a request, and waits for its end
            await self.send(Updated(idle=True))

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._receive(event.data)
            return
        self._left.set()
        await self._end_streams()

    async def stream_send(self, event: StreamEvent) -> None:
        if self.closed:
            return
        if event.stream_id in self.streams:  # else it was reset
            if isinstance(event, Body):
                self._budget.earn()
                self._with_body.add(event.stream_id)
            elif isinstance(event, EndBody) and event.stream_id not in self._with_body:
                self._budget.earn()  # as a single part, lest an answer to HEAD bring nothing
        if isinstance(event, EndBody | StreamClosed):
            self._with_body.discard(event.stream_id)
        await super().stream_send(event)

    async def _create_stream(self, request: RequestReceived) -> None:
        await super()._create_stream(request)
        self.keep_alive_requests = 0  # at its limit, hypercorn would cut off the connection's running streams

    async def _receive(self, data: bytes) -> None:
        try:
            for piece in self._slices.cut(data):
                if piece.full:
                    await self._turns.enter()
                if self.closed:
                    return
                await self._take(piece)
        except ProtocolError as error:
            if not self.closed:
                await self._end(error.error_code)

    async def _take(self, piece: Slice) -> None:
        if not self._budget.spend(piece.price):
            _log.warning("too many HTTP/2 resets or control frames: %s", _ENDED)
            await self._end(ErrorCodes.ENHANCE_YOUR_CALM)
            return
        try:
            await super().handle(RawData(piece.data))
        except Exception as error:  # noqa: BLE001 - its traceback would show what the client sent
            _log.warning("%s over HTTP/2: %s", type(error).__name__, _ENDED)
            await self._end(ErrorCodes.INTERNAL_ERROR)

    async def _end(self, why: ErrorCodes) -> None:
        with suppress(ProtocolError):  # it has ended itself
            self.connection.close_connection(why)
        await self._flush()
        await self._end_streams()
        self.task_group.spawn(self._close_later)

    async def _end_streams(self) -> None:
        await super().handle(Closed())
        for buffer in list(self.stream_buffers.values()):  # nobody sends any more: let go who waits for that
            await buffer.close()

    async def _close_later(self) -> None:
        with anyio.move_on_after(_LINGER):
            await self._left.wait()
        await self.send(Closed())

    async def _handle_events(self, events: list[FrameEvent]) -> None:
        reset = {event.stream_id for event in events if isinstance(event, StreamReset)}
        for event in events:
            if isinstance(event, RequestReceived):
                if event.stream_id in reset:
                    continue
                if not _is_addressed(event):
                    self.connection.reset_stream(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
                    continue
            elif isinstance(event, DataReceived) and event.stream_id not in self.streams:  # its stream has ended
                self.connection.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id or 0)
                continue
            elif isinstance(event, PriorityUpdated):
                continue
            await super()._handle_events([event])
        await self._flush()


def _is_addressed(request: RequestReceived) -> bool:
    """Whether a request names a method and a path, in ASCII; HTTP/1 requests without are refused by their parser."""
    named = dict(request.headers or ())
    return all(bytes(named.get(name, b"\xff")).isascii() for name in (b":method", b":path"))

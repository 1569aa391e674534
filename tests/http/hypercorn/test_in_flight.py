"""Readers: who takes a long answer slowly is waited for, who takes nothing is cut off, and neither hurts the watch."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import anyio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamReset
from hypercorn.protocol.h2 import H2Protocol
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.http.endpoints.generate import GenerateEventEncoder
from aengine.http.hypercorn.connection import connection_of
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.hypercorn.receiving import Receiving
from aengine.http.streams.sse import EventStreamResponse
from aengine.types import Fragment
from tests.http.fake_engine import FakeStream
from tests.http.serving import hosting, with_lifespan

pytestmark = pytest.mark.anyio

LONG = 2**20  # bytes
SCOPE: Scope = {"type": "http"}


async def nothing() -> Message:
    return await asyncio.get_running_loop().create_future()


async def test_a_long_answer_goes_out_in_pieces_and_whole() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = bytes(range(256)) * (LONG // 256) + b"end"
    await InFlight(Response(body))(SCOPE, nothing, send)
    start, *pieces = sent
    assert start["type"] == "http.response.start"
    assert b"".join(piece["body"] for piece in pieces) == body
    assert max(len(piece["body"]) for piece in pieces) <= 2**16
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.slow
async def test_who_takes_each_piece_in_time_is_waited_for() -> None:
    async def send(message: Message) -> None:
        await asyncio.sleep(
            1.5 * len(message.get("body", b"")) / LONG
        )  # a second and a half altogether, the limit and a half

    in_flight = InFlight(Response(bytes(LONG)))
    async with anyio.create_task_group() as tasks:
        await tasks.start(in_flight.watch_readers, 1.0)
        await in_flight(SCOPE, nothing, send)
        tasks.cancel_scope.cancel()
    assert in_flight.stalled == 0


async def test_who_takes_nothing_is_cut_off() -> None:
    async def send(message: Message) -> None:
        await asyncio.get_running_loop().create_future()

    in_flight = InFlight(Response(bytes(LONG)))
    async with anyio.create_task_group() as tasks:
        await tasks.start(in_flight.watch_readers, 0.05)
        async with asyncio.timeout(30):
            await in_flight(SCOPE, nothing, send)
        tasks.cancel_scope.cancel()
    assert in_flight.stalled == 1


async def test_where_the_connection_goes_on_a_stream_says_why_it_ends() -> None:
    """As over HTTP/2: the reader takes nothing until it is given up."""
    given_up, told = asyncio.Event(), list[bytes]()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            return
        if not given_up.is_set():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                given_up.set()
        told.append(message["body"])

    stream = FakeStream("r", prompt_tokens=1, one_by_one=False)
    stream.put(Fragment("x", (1,)))
    reply = EventStreamResponse(stream, GenerateEventEncoder(1), heartbeat=10, max_backlog=1000)
    in_flight = InFlight(Receiving(reply, 1.0))
    async with anyio.create_task_group() as tasks:
        await tasks.start(in_flight.watch_readers, 0.05)
        async with asyncio.timeout(30):
            await in_flight({"type": "http", "http_version": "2", "headers": []}, nothing, send)
        tasks.cancel_scope.cancel()
    (event,) = told
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "reader_timeout"
    assert stream.aborted.is_set()


async def test_who_sends_without_end_reads_nothing_and_then_resets_is_let_go() -> None:
    """The answer comes before the body has, and hypercorn's queue of body messages is full when the client leaves."""
    answer = Response(bytes(20 * LONG))

    in_flight = InFlight(Receiving(answer, 1.0))
    async with hosting(with_lifespan(in_flight)) as (port, _), anyio.create_task_group() as tasks:
        watching = await tasks.start(in_flight.watch_readers, 20.0)
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", port))
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
        await loop.sock_sendall(raw, head)
        with anyio.move_on_after(1):
            await loop.sock_sendall(raw, b"y" * 30_000_000)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        async with asyncio.timeout(30):
            await in_flight.idle()
        assert in_flight.stalled == 0
        assert not watching.cancel_called
        watching.cancel()


async def test_nothing_is_kept_of_http2_streams_that_were_given_up() -> None:
    """Nothing comes for the connection as a whole, whose window is wide, that would wake hypercorn's sender."""
    connections = set()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connections.add(connection_of(send))
        await in_flight(scope, receive, send)

    in_flight = InFlight(Response(bytes(LONG)))
    async with hosting(with_lifespan(app)) as (port, _), anyio.create_task_group() as tasks:
        watching = await tasks.start(in_flight.watch_readers, 0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.increment_flow_control_window(2**24)
        asked = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "a")]
        for stream in range(1, 20, 2):
            client.send_headers(stream, asked, end_stream=True)
        reset = 0
        async with asyncio.timeout(30):
            while reset < 10:
                writer.write(client.data_to_send())
                reset += sum(isinstance(event, StreamReset) for event in client.receive_data(await reader.read(2**16)))
            await in_flight.idle()
            (connection,) = connections
            assert isinstance(connection, H2Protocol)
            while connection.stream_buffers:  # noqa: ASYNC110 - hypercorn has no event for it
                await asyncio.sleep(0)
        assert in_flight.stalled == 10
        watching.cancel()
        writer.close()

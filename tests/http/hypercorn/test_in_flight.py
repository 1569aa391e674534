"""The server waits for slow readers and closes the connections of stalled ones; the watch survives both."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import anyio
import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from aengine.config import ServerConfig
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.hypercorn.receiving import Receiving
from aengine.http.native.generate import GenerateEventEncoder
from aengine.http.streams.sse import EventStreamResponse
from aengine.types import Fragment
from tests.http.fake_engine import FakeStream
from tests.http.serving import hosting, with_lifespan

pytestmark = pytest.mark.anyio

LONG = 2**20  # bytes
SCOPE: Scope = {"type": "http"}


async def nothing() -> Message:
    return await asyncio.get_running_loop().create_future()


async def test_a_long_answer_is_sent_complete_and_in_pieces() -> None:
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


async def test_a_slow_reader_that_makes_progress_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither silence before a message counts nor pieces that the reader has read."""
    now = 0.0
    monkeypatch.setattr("aengine.http.hypercorn.in_flight.monotonic", lambda: now)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal now
        await send({"type": "http.response.start", "status": 200, "headers": []})
        now += 100
        await send({"type": "http.response.body", "body": bytes(LONG)})

    async def send(message: Message) -> None:
        nonlocal now
        now += 0.7
        in_flight._disconnect_stalled(1.0)

    in_flight = InFlight(answer)
    await in_flight(SCOPE, nothing, send)
    assert now > 110
    assert in_flight.stalled == 0


async def test_a_stalled_reader_is_disconnected() -> None:
    async def send(message: Message) -> None:
        await asyncio.get_running_loop().create_future()

    in_flight = InFlight(Response(bytes(LONG)))
    async with anyio.create_task_group() as tasks:
        await tasks.start(in_flight.watch_readers, 0.05)
        async with asyncio.timeout(30):
            await in_flight(SCOPE, nothing, send)
        tasks.cancel_scope.cancel()
    assert in_flight.stalled == 1


async def test_a_stalled_stream_ends_with_an_error_if_the_connection_cannot_be_closed() -> None:
    """In another server than hypercorn, the connection stays open when a stalled reader is given up."""
    given_up, reported = asyncio.Event(), list[bytes]()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            return
        if not given_up.is_set():
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                given_up.set()
        reported.append(message["body"])

    stream = FakeStream("r", prompt_tokens=1, one_by_one=False)
    stream.put(Fragment("x", (1,)))
    reply = EventStreamResponse(stream, GenerateEventEncoder(1), ServerConfig(heartbeat=10, max_stream_backlog=1000))
    in_flight = InFlight(Receiving(reply))
    async with anyio.create_task_group() as tasks:
        await tasks.start(in_flight.watch_readers, 0.05)
        async with asyncio.timeout(30):
            await in_flight({"type": "http", "http_version": "1.1", "headers": []}, nothing, send)
        tasks.cancel_scope.cancel()
    (event,) = reported
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "reader_timeout"
    assert stream.aborted.is_set()


async def test_a_client_that_sends_without_reading_and_resets_is_released() -> None:
    """The answer precedes the body, and hypercorn's queue of body messages is full when the client leaves."""
    answer = Response(bytes(20 * LONG))

    in_flight = InFlight(Receiving(answer))
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

"""HTTP/2 connections under floods: an attacker's is ended before it costs much, an honest one never."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

import anyio
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, PingAckReceived, RequestReceived
from hypercorn.protocol.h2 import H2Protocol
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from aengine.http.hypercorn import frame_budget
from aengine.http.hypercorn.frames import PREFACE
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.hypercorn.install import install
from tests.http.hypercorn.http2_client import frame, http2_client
from tests.http.serving import hosting, with_lifespan

pytestmark = pytest.mark.anyio

HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW = 1, 2, 3, 4, 6, 8


@pytest.fixture(autouse=True)
def _installed() -> None:
    install()


@pytest.fixture
def _no_refill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time brings no tokens: on a busy machine a flood may take so long that it is none."""
    monkeypatch.setattr(frame_budget, "PER_SECOND", 0.0)


NO_REFILL = pytest.mark.usefixtures("_no_refill")


class Reader:
    """Reads bodies and answers with their length; counts what began, and what had to wait for its body."""

    def __init__(self) -> None:
        self.begun = 0
        self.left = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun += 1
        length, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            length += len(message["body"])
            more = message["more_body"]
        await Response(str(length))(scope, receive, send)

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.begun < count:  # noqa: ASYNC110 - until they are there
                await asyncio.sleep(0)


@NO_REFILL
async def test_a_rapid_reset_is_told_to_calm_down_and_starts_nothing() -> None:
    app = Reader()
    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        for _ in range(900):
            client.cancel(client.open())
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == ErrorCodes.ENHANCE_YOUR_CALM
    assert app.begun < 30  # of 166: where a slice ended between opening and reset


@NO_REFILL
async def test_resets_that_come_later_are_counted_as_well() -> None:
    app = Reader()
    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        for number in range(1, 10):
            streams = [client.open() for _ in range(20)]
            await client.send()
            if number < 9:  # the last ones are not taken up any more
                await app.until_begun(20 * number)
            for stream in streams:
                client.cancel(stream)
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == ErrorCodes.ENHANCE_YOUR_CALM


@NO_REFILL
@pytest.mark.parametrize("leaves", [False, True], ids=["after its answer", "before it"])
async def test_an_answer_does_not_pay_for_the_reset_of_its_request(leaves: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if leaves:
            assert (await receive())["type"] == "http.disconnect"
        await Response("no")(scope, receive, send)

    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        acknowledged: list[Event] = []

        def note(event: Event) -> None:
            if isinstance(event, PingAckReceived):
                acknowledged.append(event)

        for number in range(1, 51):  # 166 requests are free
            streams: set[int] = {client.open() for _ in range(20)}
            client.h2.ping(bytes(8))  # answered behind what came before it
            ended = set() if leaves else streams
            await client.read_until(
                lambda number=number, ended=ended: (
                    client.goaway is not None or (len(acknowledged) == number and client.ended >= ended)
                ),
                note,
            )
            if client.goaway is not None:
                break
            for stream in streams:
                client.cancel(stream)
        assert client.goaway == ErrorCodes.ENHANCE_YOUR_CALM


@NO_REFILL
async def test_answers_without_a_body_pay_for_their_requests() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(status_code=204)(scope, receive, send)

    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        for _ in range(1200):  # of a request alone 500 are free, and 50 a second
            stream = client.open(method="HEAD", end=True)
            await client.send(frame(WINDOW, payload=b"\0\0\0\1"))
            await client.read_until(lambda stream=stream: client.goaway is not None or stream in client.ended)
        assert client.goaway is None


@NO_REFILL
@pytest.mark.parametrize(
    "one",
    [
        frame(PING, payload=bytes(8)),
        frame(SETTINGS, payload=b"\0\x04\0\1\0\0"),
        frame(PRIORITY, 0, 1, b"\0\0\0\0\x10"),
        frame(WINDOW, payload=b"\0\0\0\1"),
        frame(0, 0, 1),
        frame(0xBB),
    ],
    ids=["ping", "settings", "priority", "window update", "empty data", "unknown"],
)
async def test_other_frames_that_bring_nothing_are_bounded_too(one: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with hosting(with_lifespan(Reader())) as (port, _), http2_client(port) as client:
        client.open()
        await client.send(one * 1500)
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == ErrorCodes.ENHANCE_YOUR_CALM
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "too many HTTP/2 resets or control frames: a client's connection was ended"


@pytest.mark.parametrize(
    ("junk", "why"),
    [
        (b"\xff\xff\xff" + bytes(6), ErrorCodes.FRAME_SIZE_ERROR),
        ((2**14 + 1).to_bytes(3) + bytes(6), ErrorCodes.FRAME_SIZE_ERROR),
        (b"junk" * 25_000, ErrorCodes.FRAME_SIZE_ERROR),
        (frame(0xBB), ErrorCodes.PROTOCOL_ERROR),
    ],
    ids=["16 MiB announced", "a byte too many announced", "100 KB of text", "a frame before SETTINGS"],
)
async def test_junk_behind_the_preface_is_refused(junk: bytes, why: int, caplog: pytest.LogCaptureFixture) -> None:
    async with hosting(with_lifespan(Reader())) as (port, _), http2_client(port, settings=False) as client:
        await client.send(PREFACE + junk)
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == why
    assert caplog.messages == []  # any scanner of ports makes some


async def test_a_frame_that_is_too_long_ends_its_connection_alone() -> None:
    app = Reader()
    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client, http2_client(port) as other:
        running = other.open()
        await other.send()
        client.open()
        await client.send()
        await app.until_begun(2)
        await client.send((2**20).to_bytes(3) + bytes(2) + (1).to_bytes(4))
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == ErrorCodes.FRAME_SIZE_ERROR
        await client.read_until(lambda: client.closed)
        other.h2.end_stream(running)
        await other.read_until(lambda: running in other.ended)
        assert other.statuses == {running: 200}
    assert app.left == 1


async def test_a_flood_is_taken_in_little_by_little() -> None:
    """Between two turns of the others, of all connections together no more than a slice."""
    app = Reader()
    turns = 0
    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as one, http2_client(port) as two:
        for client in (one, two):
            for _ in range(100):
                client.open()
            await client.send()
        begun = 0
        async with asyncio.timeout(30):
            while app.begun < 200:
                await asyncio.sleep(0)
                assert app.begun - begun <= 16
                turns += app.begun > begun
                begun = app.begun
    assert turns >= 200 / 16


async def test_all_streams_of_a_full_connection_may_be_cancelled() -> None:
    """As a proxy does whose users all leave."""
    app = Reader()
    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        streams = [client.open() for _ in range(100)]
        await client.send()
        await app.until_begun(100)
        for stream in streams:
            client.cancel(stream)
        last = client.open(end=True)
        await client.read_until(lambda: last in client.ended)
        assert client.statuses == {last: 200}
        assert client.goaway is None


async def test_a_client_that_acknowledges_and_pings_with_every_fragment_is_served() -> None:
    fragments = 1500

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(fragments):
            await send({"type": "http.response.body", "body": b"word", "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:

        def eager(event: Event) -> None:
            if isinstance(event, DataReceived) and event.data:
                client.h2.increment_flow_control_window(1)
                client.h2.increment_flow_control_window(1, event.stream_id)
                client.h2.ping(bytes(8))

        stream = client.open(end=True)
        await client.read_until(lambda: stream in client.ended, eager)
        assert client.bodies[stream] == b"word" * fragments
        assert client.goaway is None


async def test_priorities_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """Of streams that never come, on each other, in circles."""
    async with hosting(with_lifespan(Reader())) as (port, _), http2_client(port) as client:
        for stream in range(1, 1601, 2):
            payload = struct.pack(">IB", 1601 - stream, 200)
            await client.send(frame(PRIORITY, 0, stream, payload))
        last = client.open(end=True)
        await client.read_until(lambda: last in client.ended)
        assert client.bodies[last] == b"0"
    assert not caplog.records


async def test_data_for_a_stream_that_is_over_does_not_end_the_others() -> None:
    """The answer came before the body, and was the last of its stream for hypercorn."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/early":
            await Response("no")(scope, receive, send)
        else:
            await Reader()(scope, receive, send)

    async with hosting(with_lifespan(app)) as (port, _), http2_client(port) as client:
        early, other = client.open("/early"), client.open("/")
        await client.read_until(lambda: early in client.ended)
        for _ in range(7):  # nearly its window: what is thrown away is acknowledged all the same
            client.h2.send_data(early, bytes(2**13))
            client.h2.send_data(other, b"x" * 100)
            await client.read_until(lambda: client.h2.outbound_flow_control_window > 2**14)
        client.h2.end_stream(other)
        await client.read_until(lambda: other in client.ended)
        assert client.bodies[other] == b"700"


@pytest.mark.parametrize("path", [b"/\xff\xfe", b"/secret\xc3\xa9"])
async def test_a_path_that_is_not_ascii_resets_its_stream_alone(path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with hosting(with_lifespan(Reader())) as (port, _), http2_client(port) as client:
        wrong = client.h2.get_next_available_stream_id()
        headers = [(b":method", b"GET"), (b":path", path), (b":scheme", b"http"), (b":authority", b"a")]
        client.h2.send_headers(wrong, headers, end_stream=True)
        right = client.open(end=True)
        await client.read_until(lambda: right in client.ended and wrong in client.resets)
        assert client.resets == {wrong: ErrorCodes.PROTOCOL_ERROR}
    assert "secret" not in caplog.text


async def test_what_hypercorn_stumbles_over_ends_its_connection_and_shows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble(self: H2Protocol, request: RequestReceived) -> None:
        raise LookupError(request.headers)

    monkeypatch.setattr(H2Protocol, "_create_stream", stumble)
    async with hosting(with_lifespan(Reader())) as (port, _), http2_client(port) as client:
        client.open("/secret")
        await client.read_until(lambda: client.goaway is not None)
        assert client.goaway == ErrorCodes.INTERNAL_ERROR
    assert caplog.messages == ["LookupError over HTTP/2: a client's connection was ended"]
    assert "secret" not in caplog.text


async def test_a_connection_without_a_stream_ends_after_its_time() -> None:
    async with hosting(with_lifespan(Reader()), keep_alive_timeout=0.2) as (port, _), http2_client(port) as client:
        await client.read_until(lambda: client.closed)
        assert client.closed


async def test_a_long_lived_connection_keeps_its_running_streams() -> None:
    """`keep_alive_max_requests` is for HTTP/1: hypercorn would cut off what runs."""
    async with hosting(with_lifespan(Reader()), keep_alive_max_requests=3) as (port, _), http2_client(port) as client:
        running = client.open()
        for _ in range(8):
            stream = client.open(end=True)
            await client.read_until(lambda stream=stream: stream in client.ended)
        client.h2.send_data(running, b"body", end_stream=True)
        await client.read_until(lambda: running in client.ended)
        assert client.bodies[running] == b"4"


async def test_a_client_that_leaves_a_whole_answer_is_not_waited_for() -> None:
    in_flight = InFlight(Response(bytes(2**20)))
    async with hosting(with_lifespan(in_flight)) as (port, _), anyio.create_task_group() as tasks:
        watching = await tasks.start(in_flight.watch_readers, 60.0)
        client = H2Connection(H2Configuration(client_side=True))
        client.initiate_connection()
        client.send_headers(
            1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "a")], end_stream=True
        )
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(raw, client.data_to_send())
            async with asyncio.timeout(30):
                while not in_flight.blocked:  # noqa: ASYNC110 - until it is
                    await asyncio.sleep(0.001)
        async with asyncio.timeout(30):
            await in_flight.idle()
        assert in_flight.stalled == 0
        watching.cancel()

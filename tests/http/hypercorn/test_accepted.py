"""Connections close with their client, make room for new ones, and never wait for a reader for ever."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import hypercorn.asyncio.run
import pytest
from hypercorn.config import Config
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.http.hypercorn import accepted
from aengine.http.hypercorn.accepted import AcceptedConnection, OpenConnections
from tests.http.serving import hosting, with_lifespan

pytestmark = pytest.mark.anyio

ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
ANSWER: ASGIApp = with_lifespan(Response("ok"))
MOST = 3


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> OpenConnections:
    connections = OpenConnections(MOST)
    monkeypatch.setattr(hypercorn.asyncio.run, "TCPServer", partial(AcceptedConnection, connections))
    return connections


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @staticmethod
    async def connect(port: int) -> Peer:
        return Peer(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self) -> bytes:
        """Return the answer; empty if the connection has been closed."""
        async with asyncio.timeout(30):
            try:
                self._writer.write(ASK)
                return await self._reader.readuntil(b"ok")
            except (asyncio.IncompleteReadError, ConnectionError):
                return b""

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.close()


async def counted(connections: OpenConnections, count: int) -> None:
    async with asyncio.timeout(30):
        while connections.count != count:  # noqa: ASYNC110 - no event exists
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("asks", [True, False])
async def test_a_connection_ends_with_its_client(connections: OpenConnections, asks: bool) -> None:
    async with hosting(ANSWER, keep_alive_timeout=600) as (port, _):
        peer = await Peer.connect(port)
        await counted(connections, 1)
        if asks:
            assert await peer.ask()
        peer.close()
        await counted(connections, 0)
        assert not connections.idle


async def test_a_connection_whose_client_leaves_while_it_is_answered_ends_too(connections: OpenConnections) -> None:
    """The answer is complete, and hypercorn would treat the connection as idle again."""
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        await Response("ok")(scope, receive, send)

    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        peer = await Peer.connect(port)
        asking = asyncio.create_task(peer.ask())
        await begun.wait()
        peer.reset()
        assert not await asking
        await counted(connections, 0)


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="of Linux")
@pytest.mark.parametrize("leave", [socket.socket.close, pytest.param(reset, marks=pytest.mark.slow)])
@pytest.mark.parametrize("behind", [b"x", ASK, ASK * 20_000], ids=["a byte", "a request", "more than is read ahead"])
async def test_a_client_that_pipelines_and_leaves_is_noticed_and_forgotten(
    connections: OpenConnections, leave: Callable[[socket.socket], None], behind: bytes
) -> None:
    """hypercorn reads nothing while it answers, and would begin with the other requests afterwards."""
    begun = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal begun
        begun += 1
        while (await receive())["type"] != "http.disconnect":
            pass

    loop = asyncio.get_running_loop()
    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, ("127.0.0.1", port))
            sending = asyncio.create_task(loop.sock_sendall(raw, ASK + behind))
            async with asyncio.timeout(30):
                while not begun:  # noqa: ASYNC110 - no event exists
                    await asyncio.sleep(0.001)
            await asyncio.wait([sending], timeout=0.1)
            sending.cancel()
            leave(raw)
        await counted(connections, 0)
    assert begun == 1


async def test_once_its_client_has_left_nothing_is_written_to_a_connection(
    connections: OpenConnections, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would log a line for each write."""
    begun, left = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await left.wait()
        await Response("ok")(scope, receive, send)

    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        peer = await Peer.connect(port)
        peer.send(ASK * 200)
        await begun.wait()
        peer.reset()
        await asyncio.sleep(0.05)  # until the server has received it
        left.set()
        await counted(connections, 0)
    assert not caplog.messages


async def test_a_new_connection_replaces_the_one_that_is_idle_for_longest(
    connections: OpenConnections,
) -> None:
    async with hosting(ANSWER, keep_alive_timeout=600) as (port, _):
        first, second, third = [await Peer.connect(port) for _ in range(MOST)]
        for peer in (second, third, first):
            assert await peer.ask()
        fourth = await Peer.connect(port)
        assert await fourth.ask()
        assert not await second.ask()
        assert await first.ask()
        assert await third.ask()
        for peer in (first, second, third, fourth):
            peer.close()


async def test_a_new_connection_is_closed_if_none_is_idle(connections: OpenConnections) -> None:
    finish = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await finish.wait()
        await Response("ok")(scope, receive, send)

    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        busy = [await Peer.connect(port) for _ in range(MOST)]
        answers = [asyncio.create_task(peer.ask()) for peer in busy]
        while connections.idle or connections.count < MOST:  # noqa: ASYNC110 - no event exists
            await asyncio.sleep(0.001)
        one_more = await Peer.connect(port)
        assert not await one_more.ask()
        finish.set()
        assert all(await asyncio.gather(*answers))
        for peer in busy:
            peer.close()


HALF = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf"


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="of Linux")
async def test_a_new_connection_replaces_one_whose_body_has_stalled(
    connections: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "_POLL", 0.01)
    monkeypatch.setattr(accepted, "_SILENCE", 0.1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request" and message["more_body"]:
            pass
        await Response("ok")(scope, receive, send)

    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        halves = [await Peer.connect(port) for _ in range(MOST)]
        for peer in halves:
            peer.send(HALF)
        async with asyncio.timeout(30):
            while len(connections.stalled) < MOST:  # noqa: ASYNC110 - no event exists
                await asyncio.sleep(0.001)
        other = await Peer.connect(port)
        assert await other.ask()
        assert connections.count == MOST
        for peer in (*halves, other):
            peer.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="of Linux")
async def test_a_body_that_arrives_and_a_request_that_is_answered_have_not_stalled(
    connections: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepted, "_POLL", 0.01)
    monkeypatch.setattr(accepted, "_SILENCE", 0.0)
    finish = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await finish.wait()
        await Response("ok")(scope, receive, send)

    async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
        half, whole = await Peer.connect(port), await Peer.connect(port)
        answer = asyncio.create_task(whole.ask())
        half.send(HALF)
        async with asyncio.timeout(30):
            while len(connections.stalled) != 1:  # noqa: ASYNC110 - no event exists
                await asyncio.sleep(0.001)
            half.send(b"_done")
            while connections.stalled:  # noqa: ASYNC110 - no event exists
                await asyncio.sleep(0.001)
        finish.set()
        assert await answer
        half.close()
        whole.close()


def accepted_by(connections: OpenConnections, monkeypatch: pytest.MonkeyPatch) -> list[AcceptedConnection]:
    """Collect the connections that servers accept from now on."""
    accepts: list[AcceptedConnection] = []

    def accept(*args: Any) -> AcceptedConnection:
        accepts.append(AcceptedConnection(connections, *args))
        return accepts[-1]

    monkeypatch.setattr(hypercorn.asyncio.run, "TCPServer", accept)
    return accepts


async def test_a_closing_connection_counts_until_its_data_is_sent_or_time_is_up(
    connections: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that is not HTTP makes hypercorn close and wait. The regular check must not end this wait."""
    monkeypatch.setattr(accepted, "_POLL", 0.02)
    monkeypatch.setattr(accepted, "_CLOSING", 1.0)
    waits = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        (connection,) = accepts
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection.writer.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
        waits.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    accepts = accepted_by(connections, monkeypatch)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        async with hosting(with_lifespan(app), keep_alive_timeout=600) as (port, _):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, ("127.0.0.1", port))
            head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
            await loop.sock_sendall(raw, head)
            await waits.wait()
            await loop.sock_sendall(raw, b"zzz\r\n")
            transport = accepts[0].writer.transport
            async with asyncio.timeout(30):
                while connections.count:  # noqa: ASYNC110 - no event exists
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            assert not transport.get_write_buffer_size()  # aborted


async def test_a_client_that_does_not_read_the_last_of_an_answer_is_dropped_in_time(
    connections: OpenConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection may be idle, because the data in asyncio's buffer is below its limit."""
    monkeypatch.setattr(accepted, "_CLOSING", 0.1)
    sent = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        (connection,) = accepts
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection.writer.transport.get_write_buffer_size():
            await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        sent.set()

    accepts = accepted_by(connections, monkeypatch)
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        async with hosting(with_lifespan(app), keep_alive_timeout=0.1) as (port, _):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(raw, ("127.0.0.1", port))
            await loop.sock_sendall(raw, ASK)
            async with asyncio.timeout(30):
                await sent.wait()
            await counted(connections, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of descriptors")
@pytest.mark.parametrize("files", [512, 1024, 65536])
def test_connections_above_the_bound_find_descriptors_until_they_are_closed(
    files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If none is left, asyncio accepts nothing for a second, with a traceback."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    assert files - accepted.most_connections() > 2 * Config().backlog

"""Only HTTP/1.1: HTTP/2 and WebSocket are refused in one answer, and refused connections close."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

import pytest
from hypercorn.config import Config

from aengine.http.hypercorn import install as installing
from aengine.http.hypercorn.accepted import OpenConnections
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

MOST = 3  # connections
# A client's first data: SETTINGS, WINDOW_UPDATE, and HEADERS of GET /.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAMES = bytes.fromhex("000000040000000000 000004080000000000 7fff0000 000003010500000001 828684")
# The server's empty SETTINGS, and GOAWAY: no stream was processed, HTTP_1_1_REQUIRED.
GOAWAY = bytes.fromhex("000000040000000000 000029070000000000 00000000 0000000d") + b"this server speaks HTTP/1.1 alone"
KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
VERSION = b"Sec-WebSocket-Version: 13\r\n"


async def ask(port: int, data: bytes) -> tuple[bytes, asyncio.StreamWriter]:
    """Return the first answer, head and body, and the connection, which is open on this side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head + await reader.readexactly(int(length.partition(b":")[2])), writer


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        (b"1.1", KEY + VERSION),
        (b"1.1", VERSION),
        (b"1.1", KEY),
        (b"1.1", KEY + b"Sec-WebSocket-Version: 8\r\n"),
        (b"1.0", KEY + VERSION),
        (b"1.1", KEY + VERSION + b"Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Protocol: a\r\n"),
    ],
    ids=["valid", "no key", "no version", "another version", "HTTP/1.0", "extensions"],
)
@pytest.mark.parametrize("path", [b"/health", b"/v1/responses", b"/v1/realtime"])
async def test_websocket_handshakes_are_a_404_and_keep_no_connection_busy(
    monkeypatch: pytest.MonkeyPatch, path: bytes, version: bytes, headers: bytes
) -> None:
    """More clients than allowed send a handshake and stay connected. Another client is still answered."""
    monkeypatch.setattr(installing, "most_connections", lambda: MOST)
    handshake = b"GET %b HTTP/%b\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n%b\r\n"
    async with serving() as server:
        open_ones = []
        for _ in range(MOST + 1):
            answer, writer = await ask(server.port, handshake % (path, version, headers))
            assert answer.startswith(b"HTTP/1.1 404 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_found"
            open_ones.append(writer)
        answer, writer = await ask(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        for one in (writer, *open_ones):
            one.close()


async def all_of(port: int, data: bytes) -> bytes:
    """Return the data up to the end of the connection."""
    loop, heard = asyncio.get_running_loop(), b""
    with socket.socket() as raw:
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", port))
        with suppress(ConnectionError):  # it may close before all is sent or read
            await loop.sock_sendall(raw, data)
        with suppress(ConnectionError):
            async with asyncio.timeout(60):
                while some := await loop.sock_recv(raw, 2**16):
                    heard += some
    return heard


@pytest.mark.parametrize("data", [PREFACE, PREFACE + FRAMES, PREFACE + FRAMES + bytes(2**20)])
async def test_an_http2_preface_is_refused_in_one_answer(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Clients show the reason in GOAWAY. The connection closes at once."""
    open_ones = OpenConnections(MOST)
    monkeypatch.setattr(installing, "OpenConnections", lambda most: open_ones)
    async with serving(api_keys=("secret",)) as server:
        assert await all_of(server.port, data) == GOAWAY
        async with asyncio.timeout(60):
            while open_ones.count:  # noqa: ASYNC110 - no event exists
                await asyncio.sleep(0.001)


async def test_a_request_in_another_version_is_refused() -> None:
    async with serving(api_keys=("secret",)) as server:
        answer = await all_of(server.port, b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 505 ")
    error = json.loads(body)["error"]
    assert error["message"] == "this server speaks HTTP/1.1 alone, and was spoken to in HTTP/2.0"
    assert error["type"] == "invalid_request_error"


async def test_an_upgrade_to_http2_is_answered_over_http1() -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    async with serving() as server:
        answer, writer = await ask(server.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + upgrade + b"\r\n")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_tls_offers_http1_alone() -> None:
    installing.install(asyncio.get_running_loop())
    assert Config().alpn_protocols == ["http/1.1"]

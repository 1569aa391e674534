"""A real hypercorn on a free loopback port, inside the test's own loop."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.types import ASGIApp, Receive, Scope, Send

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from tests.http.fake_engine import FakeEngine


class Server:
    """A running server: its engine, an HTTP client for it, and where it listens."""

    def __init__(self, engine: FakeEngine, client: httpx2.AsyncClient, port: int, stop: asyncio.Event) -> None:
        self.engine = engine
        self.client = client
        self.port = port
        self.stop = stop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, **body: Any) -> httpx2.Response:
        return await self.client.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Return the parsed events of a streaming request. `[DONE]` stays text."""
        response = await self.post(path, **body)
        assert response.status_code == 200, response.text
        return parse_events(response.text)

    async def connect(self, path: str, *, receive_buffer: int | None = None, **body: Any) -> socket.socket:
        """Return a raw connection on which the request has been sent."""
        raw = socket.socket()
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, ("127.0.0.1", self.port))
        await loop.sock_sendall(raw, raw_request(path, body))
        return raw


def raw_request(path: str, body: dict[str, Any]) -> bytes:
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(payload)}\r\n\r\n"
    return head.encode() + payload


def streaming_command(port: int, path: str, body: dict[str, Any]) -> list[str]:
    """Return a program that prints a stream as it arrives: curl, or else a few lines of Python."""
    if curl := shutil.which("curl"):
        return [curl, "-sN", "--noproxy", "*", f"http://127.0.0.1:{port}{path}", "-d", json.dumps(body)]
    code = (
        "import socket, sys\n"
        f"connection = socket.create_connection(('127.0.0.1', {port}))\n"
        f"connection.sendall({raw_request(path, body)!r})\n"
        "while data := connection.recv(9999): sys.stdout.buffer.write(data); sys.stdout.flush()"
    )
    return [sys.executable, "-c", code]


async def read_until(raw: socket.socket, end: bytes) -> bytes:
    """Read up to and including `end`, or until the connection closes."""
    loop, heard = asyncio.get_running_loop(), b""
    async with asyncio.timeout(30):
        while end not in heard and (data := await loop.sock_recv(raw, 65536)):
            heard += data
    return heard


def parse_events(text: str) -> list[Any]:
    """Parse events, and check that each is one `data:` line and a blank line."""
    assert text.endswith("\n\n")
    events = []
    for block in text[:-2].split("\n\n"):
        assert block.startswith("data: "), block
        assert "\n" not in block, block
        events.append(block[6:] if block == "data: [DONE]" else json.loads(block[6:]))
    return events


def listen() -> tuple[int, int]:
    """Return a listening socket on a free loopback port, as (file descriptor, port). The caller closes it."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=128)
    port: int = sock.getsockname()[1]
    return sock.detach(), port


@asynccontextmanager
async def serving(
    engine: FakeEngine | None = None, *, graceful_timeout: float = 0.1, **knobs: Any
) -> AsyncIterator[Server]:
    """Serve `engine` with these `ServerConfig` knobs."""
    engine = engine or FakeEngine()
    app = create_app(EngineConfig(), ServerConfig(**knobs), engine_factory=lambda config: engine)
    async with hosting(app, graceful_timeout) as (port, stop):
        async with asyncio.timeout(30):
            await engine.entered.wait()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, trust_env=False) as client:
            yield Server(engine, client, port, stop)


@asynccontextmanager
async def hosting(
    app: ASGIApp, graceful_timeout: float = 0.1, **settings: Any
) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Run `app` in a hypercorn with these settings. Yields its port, and the event that stops it."""
    stop = asyncio.Event()
    file, port = listen()
    config = Config()
    config.bind = [f"fd://{file}"]
    config.graceful_timeout = graceful_timeout
    config.errorlog = None
    for name, value in settings.items():
        setattr(config, name, value)
    # A plain task: hypercorn stops by an event, and raises an error if it is cancelled.
    task = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait))  # type: ignore[arg-type]
    try:
        yield port, stop
    finally:
        stop.set()
        await task


def with_lifespan(app: ASGIApp) -> ASGIApp:
    """Return an application that answers requests with `app` and also handles the lifespan."""

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await app(scope, receive, send)

    return both

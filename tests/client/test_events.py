"""Events are complete for any split of the bytes, and an endless event is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from aengine import Client, ServerError
from aengine.client import connection

pytestmark = pytest.mark.anyio

STREAM = (
    'data: {"text":"é👋"}\n\n: ping\n\ndata:{"text":\r\ndata: "b"}\r\n\r\nid: 7\rdata: {"text":"c"}\r\r'
    'data: {"text":"","finish_reason":"stop","usage":{"prompt_tokens":1,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
).encode()


@asynccontextmanager
async def speaking(*pieces: bytes) -> AsyncIterator[Client]:
    """A server that answers with these bytes, one piece after another."""

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}") as client:
        yield client


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
async def test_wherever_it_is_cut(size: int) -> None:
    async with speaking(*(STREAM[at : at + size] for at in range(0, len(STREAM), size))) as client:
        assert [fragment.text async for fragment in client.generate("x")] == ["é👋", "b", "c", ""]


@pytest.mark.parametrize("endless", [b"x" * 10, b"data: xxxx\n"])
async def test_an_event_without_end_is_refused(endless: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_EVENT_BYTES", 100)
    async with speaking(endless * 20) as client:
        with pytest.raises(ServerError, match=r"cannot be read.*100 byte"):
            await client.complete("x")


async def test_comments_may_go_on_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_EVENT_BYTES", 100)
    async with speaking(b": ping\n\n" * 100, STREAM) as client:
        assert (await client.complete("x")).text == "é👋bc"

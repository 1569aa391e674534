"""If a consumer leaves in any way, its request ends on the server at once, and the client keeps nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import anyio
import pytest

from aengine import Client, EngineClosedError, Fragment, ServerError, Usage
from aengine.client.stream import MAX_BACKLOG
from tests.http.fake_engine import FakeEngine, FakeStream
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

PIECE = Fragment("a", (1,))
LAST = Fragment("!", (9,), None, "stop", Usage(1, 1, 0))


@asynccontextmanager
async def held_server() -> AsyncIterator[tuple[Server, Client]]:
    """A server whose streams the test controls."""
    async with serving(FakeEngine(held=True)) as server, Client(server.url) as client:
        yield server, client
        with anyio.fail_after(30):
            await client.requests_closed()


async def aborted(stream: FakeStream) -> None:
    async with asyncio.timeout(60):
        await stream.aborted.wait()


async def test_break() -> None:
    async with held_server() as (server, client), anyio.create_task_group() as tasks:
        found: list[FakeStream] = []

        async def feed() -> None:
            found.append(await server.engine.next_stream())
            found[0].put(PIECE)

        tasks.start_soon(feed)
        async for fragment in client.generate("x"):
            assert fragment == PIECE
            break
        await aborted(found[0])


async def test_closing_the_generator() -> None:
    async with held_server() as (server, client), aclosing(client.generate("x")) as fragments:
        asking = asyncio.create_task(anext(fragments))
        stream = await server.engine.next_stream()
        stream.put(PIECE)
        assert await asking == PIECE
        await fragments.aclose()
        await aborted(stream)


@pytest.mark.parametrize("said", [0, 1])
async def test_a_cancelled_task(said: int) -> None:
    """Both before the first token and after it."""
    async with held_server() as (server, client):
        task = asyncio.create_task(client.complete("x"))
        stream = await server.engine.next_stream()
        for _ in range(said):
            stream.put(PIECE)
            await asyncio.sleep(0.05)
        task.cancel()
        await aborted(stream)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_timeout() -> None:
    async with held_server() as (server, client):
        asking = asyncio.create_task(client.complete("x"))
        stream = await server.engine.next_stream()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asking, 0.01)
        await aborted(stream)


async def test_leaving_the_client_ends_running_requests() -> None:
    async with serving(FakeEngine(held=True)) as server:
        async with Client(server.url) as client:
            task = asyncio.create_task(client.complete("x"))
            stream = await server.engine.next_stream()
        with pytest.raises(EngineClosedError, match="client was closed"):
            await task
        await aborted(stream)
        with pytest.raises(EngineClosedError, match="closed"):
            await client.complete("x")


async def test_an_exception_leaves_the_client_ungrouped() -> None:
    async with serving(FakeEngine(held=True)) as server:
        tasks = []

        async def use_it() -> None:
            async with Client(server.url) as client:
                tasks.append(asyncio.create_task(client.complete("x")))
                await server.engine.next_stream()
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await use_it()
        with pytest.raises(EngineClosedError):
            await tasks[0]


async def test_a_generator_that_is_never_iterated_asks_nothing() -> None:
    async with held_server() as (server, client):
        await client.generate("x").aclose()
        assert server.engine.submitted == []


async def test_the_connection_is_not_read_while_the_consumer_is_slow() -> None:
    async with held_server() as (server, client):
        submitting = asyncio.create_task(client.submit("x"))
        held = await server.engine.next_stream()
        held.put(PIECE)
        stream = await submitting
        pieces = 1
        while stream.backlog <= MAX_BACKLOG:
            held.put(PIECE)
            pieces += 1
            await asyncio.sleep(0)
        for _ in range(200):
            held.put(PIECE)
            await asyncio.sleep(0)
        assert stream.backlog == MAX_BACKLOG + 1
        held.put(LAST)
        text = ""
        while fragments := await stream.take():
            text += "".join(fragment.text for fragment in fragments)
        assert text == "a" * (pieces + 200) + "!"


async def test_connections_are_used_again_and_given_back() -> None:
    async with serving() as server, Client(server.url) as client:
        for _ in range(5):
            await client.complete("x")
        pool = client._http._transport._pool  # type: ignore[attr-defined]
        assert len(pool.connections) == 1
        await asyncio.gather(*(client.complete("x") for _ in range(50)))
        assert len(pool.connections) <= 32
        assert all(connection.is_idle() for connection in pool.connections)
    assert pool.connections == []


async def test_a_server_that_goes_away_in_the_middle() -> None:
    async def cut_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 999\r\n\r\n")
        writer.write(b'data: {"text":"a","token_ids":[1],"finish_reason":null}\n\n')
        writer.close()

    server = await asyncio.start_server(cut_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}") as client:
        fragments = client.generate("x")
        assert (await anext(fragments)).text == "a"
        with pytest.raises(ServerError, match="broke the connection off"):
            await anext(fragments)

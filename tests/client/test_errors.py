"""Errors of a server are raised as the engine would raise them; other failures are a `ServerError`."""

from __future__ import annotations

import asyncio

import pytest

import aengine
from aengine import Client
from aengine.errors import (
    AengineError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    QueueFullError,
    ServerError,
)
from aengine.types import Fragment
from tests.free_port import free_port
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("temperature is too high", "temperature"),
        ContextLengthError("too long", "max_tokens"),
        QueueFullError("busy", retry_after=7),
        EngineNotReadyError("loading"),
        EngineClosedError("closed"),
        EngineFailedError("broken"),
    ],
)
@pytest.mark.parametrize("midway", [False, True])
async def test_errors_come_back_as_they_were(error: AengineError, midway: bool) -> None:
    engine = FakeEngine(held=True) if midway else FakeEngine(refuse=error)
    async with serving(engine) as server, Client(server.url) as client:
        task = asyncio.create_task(client.complete("x"))
        if midway:
            stream = await engine.next_stream()
            stream.put(Fragment("a", (1,)))
            stream.fail(error)
        with pytest.raises(type(error)) as caught:
            await task
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)
        if isinstance(error, InvalidRequestError):
            assert isinstance(caught.value, InvalidRequestError)
            assert caught.value.param == error.param
        if isinstance(error, QueueFullError) and not midway:  # the hint is a header
            assert isinstance(caught.value, QueueFullError)
            assert caught.value.retry_after == 7


async def test_refusals_of_http_itself_keep_status_and_code() -> None:
    async with serving(max_body_bytes=100) as server, Client(server.url) as client:
        with pytest.raises(ServerError, match="100 bytes") as caught:
            await client.complete("x" * 1000)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


async def test_a_server_that_does_not_listen() -> None:
    port = free_port()
    async with Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ServerError, match=f"127.0.0.1:{port} cannot be reached"):
            await client.complete("x")
        with pytest.raises(ServerError, match="cannot be reached"):
            await client.served_model()


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "not answer as an aengine server"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 5\r\n\r\nhello", "answered 502"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "broke the connection off"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 9\r\n\r\ndata: {\n\n",
            "cannot be read",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n", "before the answer did"),
    ],
)
async def test_something_else_listens(answer: bytes, told: str) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ServerError, match=told):
            await client.complete("x")


async def test_a_silent_server_is_given_up_after_the_timeout() -> None:
    silence = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await silence.wait()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}", timeout=0.1) as client:
        with pytest.raises(ServerError, match="sent nothing"):
            await client.complete("x")
        silence.set()


@pytest.mark.slow
async def test_a_slow_model_on_a_server_that_gives_signs_of_life_is_not_given_up() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine, heartbeat=0.05) as server, Client(server.url, timeout=1.5) as client:
        task = asyncio.create_task(client.complete("x"))
        stream = await engine.next_stream()
        done, _ = await asyncio.wait([task], timeout=2)
        assert not done
        stream.abort()
        stream.fail(EngineClosedError("enough"))
        with pytest.raises(EngineClosedError, match="enough"):
            await task


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:0", "http://host:99999", ""])
def test_an_address_that_cannot_be_one(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Client(url)


async def test_the_key_and_the_id_are_sent() -> None:
    heads = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Client(f"http://127.0.0.1:{port}/v1/", api_key="secret") as client:
        with pytest.raises(ServerError):
            await client.complete("x", request_id="mine")
    assert "post /generate " in heads[0]
    assert "authorization: bearer secret" in heads[0]
    assert "x-request-id: mine" in heads[0]


async def test_an_id_that_runs_already_or_cannot_be_a_header() -> None:
    engine = FakeEngine(held=True)
    async with serving(engine) as server, Client(server.url) as client:
        first = asyncio.create_task(client.complete("x", request_id="same"))
        await engine.next_stream()
        for wrong in ("same", "a\nb"):
            with pytest.raises(InvalidRequestError) as caught:
                await client.complete("x", request_id=wrong)
            assert caught.value.param == "request_id"
        first.cancel()


@pytest.mark.parametrize("value", ["\ud800", {"a": object()}])
async def test_values_that_json_cannot_represent(value: object) -> None:
    async with serving() as server, Client(server.url) as client:
        with pytest.raises(InvalidRequestError):
            await client.chat([{"role": "user", "content": value}])


async def test_before_it_is_entered() -> None:
    with pytest.raises(EngineNotReadyError, match="async with"):
        await Client("http://localhost").complete("x")


def test_the_name_is_loaded_on_first_use() -> None:
    assert aengine.Client is Client

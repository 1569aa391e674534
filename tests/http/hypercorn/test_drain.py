"""A server that shuts down refuses new work, lets running requests finish, and ends slow ones with an error."""

from __future__ import annotations

import asyncio

import pytest

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.types import Fragment, Usage
from tests.http.fake_engine import FakeEngine
from tests.http.serving import hosting, raw_request

pytestmark = pytest.mark.anyio

LAST = Fragment("!", (9,), None, "stop", Usage(1, 1, 0))


async def connect(port: int, path: str, **body: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw_request(path, body))
    return reader, writer


async def test_running_requests_finish_and_new_ones_are_refused() -> None:
    engine = FakeEngine(held=True)
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _):
        await app.settled.wait()
        reader, writer = await connect(port, "/generate", prompt="a")
        stream = await engine.next_stream()
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(0)
        late, late_writer = await connect(port, "/v1/completions", prompt="b")
        refusal = await late.readuntil(b"}}")
        assert b"503" in refusal
        assert b"retry-after: 1" in refusal.lower()
        assert b"shutting_down" in refusal
        assert not draining.done()
        stream.put(LAST)
        assert b"[DONE]" in await reader.readuntil(b"[DONE]\n\n")
        async with asyncio.timeout(60):
            await draining
        writer.close()
        late_writer.close()


@pytest.mark.parametrize("streamed", [True, False])
async def test_slow_requests_get_an_error_when_the_time_is_up(streamed: bool) -> None:
    engine = FakeEngine(held=True)
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _):
        await app.settled.wait()
        reader, writer = await connect(port, "/generate", prompt="a", stream=streamed)
        stream = await engine.next_stream()
        app.cut_off()
        async with asyncio.timeout(60):
            assert b"shutting_down" in await reader.readuntil(b"}}")
            await stream.aborted.wait()
            await app.drain()
        writer.close()


async def test_a_request_cancelled_before_its_body_has_arrived_is_refused() -> None:
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: FakeEngine())
    async with hosting(app) as (port, _):
        await app.settled.wait()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request("/generate", {"prompt": "a"})[:-3])
        while not app._http._active:  # type: ignore[union-attr]  # noqa: ASYNC110 - no event exists
            await asyncio.sleep(0.001)
        app.cut_off()
        async with asyncio.timeout(60):
            refusal = await reader.read()
        assert refusal.startswith(b"HTTP/1.1 503")
        assert b"shutting_down" in refusal
        assert b"connection: close" in refusal.lower()
        writer.close()


async def test_a_server_without_work_is_drained_at_once() -> None:
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: FakeEngine())
    async with hosting(app):
        await app.settled.wait()
        async with asyncio.timeout(60):
            await app.drain()
        assert app.failure is None

"""`/health`, `/ready`, `/version`, in all phases of the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import msgspec
import pytest
from starlette.requests import Request

import aengine
from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.errors import CheckpointError, DeviceLostError
from aengine.http.operators.health import STALL_SECONDS, Health
from aengine.http.state import ServerState
from aengine.requests.sampling_params import SamplingParams
from tests.http.fake_engine import IDLE, FakeEngine, recital
from tests.http.serving import hosting, serving

pytestmark = pytest.mark.anyio

REQUEST = Request({"type": "http", "headers": []})
WORK = {"prompt": "a"}


async def test_a_loaded_server_is_ready() -> None:
    async with serving() as server:
        ready = await server.client.get("/ready")
        health = await server.client.get("/health")
        version = await server.client.get("/version")
    assert (ready.status_code, ready.json()) == (200, {"ready": True, "model": "fake"})
    assert (health.status_code, health.json()) == (200, {"status": "ok"})
    assert version.json() == {"version": aengine.__version__}


class LoadingEngine(FakeEngine):
    """An engine that loads until the test lets it finish or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> LoadingEngine:
        await super().__aenter__()
        await self.loaded
        return self


async def test_a_server_answers_while_it_loads() -> None:
    engine = LoadingEngine()
    async with serving(engine) as server:
        ready = await server.client.get("/ready")
        health = await server.client.get("/health")
        work = await server.post("/generate", **WORK)
        models = await server.client.get("/v1/models")
        assert "aengine_ready 0.0" in (await server.client.get("/metrics")).text
        engine.loaded.set_result(None)
        while (await server.client.get("/ready")).status_code != 200:
            pass
        assert (await server.post("/generate", **WORK)).status_code == 200
        assert (await server.client.get("/health")).status_code == 200
    assert health.status_code == 503
    assert health.json() == {"status": "loading", "reason": "the model is still loading"}
    assert ready.status_code == work.status_code == models.status_code == 503
    assert work.json()["error"] == {
        "message": "the model is still loading",
        "type": "server_error",
        "param": None,
        "code": "not_ready",
    }
    assert work.headers["retry-after"] == "1"
    assert engine.left


async def test_a_ping_may_be_posted_as_sagemaker_and_vllm_have_it() -> None:
    async with serving(api_keys=("secret",)) as server:
        for method in ("GET", "POST"):
            answer = await server.client.request(method, "/ping")
            assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_a_server_can_be_stopped_while_it_loads() -> None:
    async with serving(LoadingEngine()) as server:
        assert (await server.client.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("error", "reported", "kept"),
    [
        (CheckpointError("/secret/folder/config.json is missing"), "config.json is missing", "secret"),
        (RuntimeError("at /secret/file.py: password"), "internal error (RuntimeError)", "password"),
    ],
)
async def test_a_server_whose_engine_cannot_load_says_why(
    error: Exception, reported: str, kept: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = LoadingEngine()
    async with serving(engine) as server:
        engine.loaded.set_exception(error)
        while (await server.client.get("/health")).json()["status"] == "loading":
            pass
        answers = [
            await server.client.get("/health"),
            await server.client.get("/ready"),
            await server.post("/generate", **WORK),
            await server.post("/v1/chat/completions", messages=[]),
        ]
    for answer in answers:
        assert answer.status_code == 503
        assert reported in answer.text
        assert kept not in answer.text
    assert str(error) in capsys.readouterr().err


async def test_a_draining_server_is_not_ready() -> None:
    """So that routers send work elsewhere while running answers finish."""
    engine = FakeEngine(held=True)
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await app.settled.wait()
        requested = asyncio.create_task(client.post("/generate", json=WORK))
        stream = await engine.next_stream()
        draining = asyncio.create_task(app.drain())
        await asyncio.sleep(0)
        health = await client.get("/health")
        stream.put(*recital(1, SamplingParams()))
        await draining
        assert (await requested).status_code == 200
    assert health.status_code == 503
    assert health.json() == {"status": "stopping", "reason": "the server is shutting down"}


async def test_the_failure_of_the_engine_shows() -> None:
    async with serving() as server:
        server.engine.failure = RuntimeError("device lost")
        health = await server.client.get("/health")
        ready = await server.client.get("/ready")
    assert health.status_code == ready.status_code == 503
    assert health.json()["status"] == "failed"
    assert "device lost" not in health.text


async def test_a_failed_engine_is_reported_even_while_the_server_stops() -> None:
    engine = FakeEngine()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with hosting(app) as (port, _), httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        await app.settled.wait()
        engine.failure = DeviceLostError("the device is lost")
        engine.failed.set()
        async with asyncio.timeout(60):
            await app.failed.wait()
        await app.drain()
        for answer in (
            await client.get("/health"),
            await client.get("/ready"),
            await client.post("/generate", json=WORK),
        ):
            assert answer.status_code == 503
            assert "the device is lost" in answer.text
        assert app.failure is engine.failure
    assert engine.left


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[FakeEngine, Health, list[float]]]:
    engine, now = FakeEngine(), [1000.0]
    state = ServerState(ServerConfig())
    state.mark_ready(engine)
    yield engine, Health(state, clock=lambda: now[0]), now


async def test_no_progress_in_spite_of_work_is_ill_health() -> None:
    async with watched() as (engine, health, now):
        engine.numbers = msgspec.structs.replace(IDLE, running=1)
        assert (await health.health(REQUEST)).status_code == 200
        now[0] += STALL_SECONDS
        assert (await health.health(REQUEST)).status_code == 200
        now[0] += 1
        stalled = await health.health(REQUEST)
        assert stalled.status_code == 503
        reason = "no step has finished for 61 s although there is work"
        assert json.loads(bytes(stalled.body)) == {"status": "stalled", "reason": reason}
        engine.numbers = msgspec.structs.replace(engine.numbers, steps=8)
        assert (await health.health(REQUEST)).status_code == 200


async def test_the_first_request_after_a_long_pause_is_no_stall() -> None:
    async with watched() as (engine, health, now):
        assert (await health.health(REQUEST)).status_code == 200
        now[0] += 3600
        engine.numbers = msgspec.structs.replace(IDLE, waiting=1)
        assert (await health.health(REQUEST)).status_code == 200

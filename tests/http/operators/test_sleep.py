"""Sleep, wake-up and reload over HTTP and through the client. They need a knob, and a key if there are keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aengine.client import Client
from aengine.errors import ConfigError, EngineNotReadyError, InvalidRequestError, ServerError, WeightsError
from tests.engine.checkpoints import other_demo, with_config
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PROMPT = [300 + number * 7 % 2000 for number in range(40)]


@pytest.fixture
def engine() -> FakeEngine:
    """An engine that can sleep."""
    made = FakeEngine()
    made.sleep_mode = True
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one of two checkpoints below it."""
    for name in ("allowed/step-1", "beside"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "allowed"


async def test_as_vllm_has_it(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        assert (await server.client.get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await server.client.post("/sleep")).json() == {"is_sleeping": True}
        assert (await server.client.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await server.client.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await server.client.post("/sleep?level=2&mode=abort")).status_code == 200
    assert engine.changes == [("sleep", 1, "wait"), ("wake_up",), ("sleep", 2, "abort")]


async def test_parts_are_not_woken(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        refused = await server.client.post("/wake_up?tags=weights")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tags")
    assert not engine.changes


async def test_off_unless_allowed(folder: Path) -> None:
    engine = FakeEngine()
    async with serving(engine) as server:
        for path, knob in (("/sleep", "sleep_mode"), ("/wake_up", "sleep_mode"), ("/reload", "reload_folders")):
            refused = await server.post(path)
            assert refused.status_code == 404
            assert knob in refused.json()["error"]["message"]
    assert not engine.changes


async def test_keys_are_asked_for(engine: FakeEngine, folder: Path) -> None:
    knobs = {"api_keys": ("secret",), "reload_folders": (str(folder),)}
    async with serving(engine, **knobs) as server:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/reload"), ("GET", "/is_sleeping")):
            assert (await server.client.request(method, path)).status_code == 401
            allowed = await server.client.request(method, path, headers={"Authorization": "Bearer secret"})
            assert allowed.status_code == 200
    assert engine.changes == [("sleep", 1, "wait"), ("wake_up",), ("reload", None)]


async def test_only_folders_below_those_of_the_knob_are_read(engine: FakeEngine, folder: Path) -> None:
    (folder / "out").symlink_to(folder.parent / "beside")
    async with serving(engine, reload_folders=(str(folder),)) as server:
        for path in ("step-1", str(folder / "step-1")):
            assert (await server.post("/reload", folder=path)).json() == {"reloaded": True}
        for path in ("../beside", str(folder.parent / "beside"), "out", "nowhere", "a" * 4000, "a\0b"):
            refused = await server.post("/reload", folder=path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "folder_not_found")
        for value in ("", 3, "a" * 5000):
            assert (await server.post("/reload", folder=value)).status_code == 400
    assert engine.changes == [("reload", str(folder / "step-1"))] * 2


async def test_a_misspelled_folder_reloads_nothing(engine: FakeEngine, folder: Path) -> None:
    async with serving(engine, reload_folders=(str(folder),)) as server:
        answer = await server.post("/reload", path_to=str(folder))
    assert answer.status_code == 400
    assert "`path_to`" in answer.json()["error"]["message"]
    assert engine.changes == []


async def test_a_server_that_refuses_requests_is_not_ready(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        engine.refusal = "the engine is asleep"
        response = await server.client.get("/ready")
        assert (response.status_code, response.json()["reason"]) == (503, "the engine is asleep")
        assert (await server.client.get("/health")).status_code == 200  # a sleeping server is healthy
        engine.refusal = ""
        assert (await server.client.get("/ready")).status_code == 200


async def test_end_to_end_through_the_client(tmp_path: Path) -> None:
    other = other_demo(tmp_path / "weights" / "other")
    with_config(other_demo(tmp_path / "weights" / "wrong"), hidden_size=128)
    engine = DemoEngine(sleep_mode=True)
    async with hosted_demo(engine, reload_folders=(str(tmp_path / "weights"),)) as url, Client(url) as client:
        before = await client.complete(PROMPT, **GREEDY)
        await client.sleep()
        assert await client.is_sleeping()
        with pytest.raises(EngineNotReadyError, match="asleep"):
            await client.complete(PROMPT, **GREEDY)
        await client.wake_up()
        assert not await client.is_sleeping()
        after = await client.complete(PROMPT, **GREEDY)
        assert (after.token_ids, after.usage.cached_tokens) == (before.token_ids, 0)

        await client.reload("other")
        changed = await client.complete(PROMPT, **GREEDY)
        async with DemoEngine(model=str(other)) as alone:
            assert changed.token_ids == (await alone.complete(PROMPT, **GREEDY)).token_ids != before.token_ids
        with pytest.raises(WeightsError, match="hidden_size is 128") as refused:
            await client.reload("wrong")
        assert str(tmp_path) not in str(refused.value)  # errors have no folders
        with pytest.raises(ServerError, match="no such folder"):
            await client.reload("nowhere")
        with pytest.raises(InvalidRequestError, match="level must be 1"):
            await client.sleep(2)
        with pytest.raises(InvalidRequestError, match="mode must be"):
            await client.sleep(mode="keep")  # type: ignore[arg-type]
        await client.reload()
        assert (await client.complete(PROMPT, **GREEDY)).token_ids == before.token_ids


async def test_of_a_server_that_allows_nothing() -> None:
    async with hosted_demo() as url, Client(url) as client:
        for call in (client.sleep, client.wake_up, client.reload):
            with pytest.raises((ServerError, ConfigError), match="knob"):
                await call()
        assert not await client.is_sleeping()

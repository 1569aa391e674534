"""Adapters over HTTP: requests name them, and clients load and unload them if the operator allows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aengine.client import Client
from aengine.config import EngineConfig, ServerConfig
from aengine.config.configure import check_names
from aengine.errors import AdapterError, ConfigError, InvalidRequestError, ModelNotFoundError, ServerError
from aengine.http.entry.errors import HTTPError
from aengine.http.operators.folders import AdapterFolders
from tests.engine.adapters import GREEDY, PROMPT, Written
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.fake_engine import FakeEngine, adapter_info
from tests.http.serving import Server, serving

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> FakeEngine:
    """An engine with one adapter that loads others."""
    made = FakeEngine()
    made.lora_loading = True
    made.adapters = [
        adapter_info("sql", "/srv/adapters/sql-v2", running=2),
        adapter_info("org/law", "org/law", waiting=1),
    ]
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for clients with two adapters, and one adapter outside of it."""
    for name in ("allowed/one", "allowed/deep/two", "beside"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path / "allowed"


# ---- chosen by the model's name -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "a b"}),
        ("/generate", {"prompt": "a b", "stream": False}),
        ("/generate", {"messages": MESSAGES, "stream": False}),
    ],
)
@pytest.mark.parametrize(("model", "adapter"), [("sql", "sql"), ("org/law", "org/law"), ("fake", None), (None, None)])
async def test_the_models_name_chooses(
    engine: FakeEngine, path: str, body: dict[str, Any], model: str | None, adapter: str | None
) -> None:
    async with serving(engine) as server:
        response = await server.post(path, **body, model=model)
    assert response.status_code == 200, response.text
    assert engine.submitted[0].options["adapter"] == adapter
    assert response.json().get("model", model or "fake") == (model or "fake")


async def test_a_streams_chunks_carry_the_name(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        chunks = await server.events("/v1/chat/completions", messages=MESSAGES, model="sql", stream=True)
    assert {chunk["model"] for chunk in chunks if chunk != "[DONE]"} == {"sql"}


async def test_an_unknown_name_is_a_404(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/generate", {"prompt": "a"})):
            response = await server.post(path, **body, model="nosql")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "model_not_found"
    assert not engine.submitted


async def test_tokens_are_the_models_own(engine: FakeEngine) -> None:
    async with serving(engine) as server:
        assert (await server.post("/tokenize", prompt="a bb", model="sql")).json()["tokens"] == [1, 2]
        assert (await server.post("/detokenize", tokens=[1], model="sql")).status_code == 200


async def test_they_are_listed_with_their_parent_and_without_folders(engine: FakeEngine) -> None:
    async with serving(engine, served_model_name="mine") as server:
        cards = (await server.client.get("/v1/models")).json()["data"]
        one = (await server.client.get("/v1/models/org/law")).json()
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("mine", "fake", None),
        ("sql", "sql-v2", "mine"),
        ("org/law", "org/law", "mine"),
    ]
    assert one == cards[2]


# ---- loading and unloading ------------------------------------------------------------------------------------


async def test_loaded_used_and_unloaded(engine: FakeEngine, folder: Path) -> None:
    async with serving(engine, lora_folders=(str(folder),)) as server:
        response = await server.post("/v1/load_lora_adapter", lora_name="new", lora_path="one")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        assert engine.adapters[-1].path == str(folder / "one")
        assert (await server.post("/generate", prompt="a", model="new")).status_code == 200
        response = await server.post("/v1/unload_lora_adapter", lora_name="new")
        assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert (await server.post("/generate", prompt="a", model="new")).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("load", {"lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "", "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "sql", "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "mine", "lora_path": "one"}, 400, "lora_name"),
        ("load", {"lora_name": "x", "lora_path": "nowhere"}, 404, None),
        ("load", {"lora_name": "x", "lora_path": 3}, 400, "lora_path"),
        ("load", {"lora_name": "x", "lora_path": "a" * 5000}, 400, "lora_path"),
        ("unload", {}, 400, "lora_name"),
        ("unload", {"lora_name": "x"}, 404, "model"),
    ],
)
async def test_refusals(
    engine: FakeEngine, folder: Path, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    before = list(engine.adapters)
    async with serving(engine, lora_folders=(str(folder),), served_model_name="mine") as server:
        response = await server.post(f"/v1/{path}_lora_adapter", **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert engine.adapters == before


async def test_loaded_in_place(engine: FakeEngine, folder: Path) -> None:
    async with serving(engine, lora_folders=(str(folder),)) as server:
        requested = {"lora_name": "sql", "lora_path": "one", "load_inplace": True}
        assert (await server.post("/v1/load_lora_adapter", **requested)).status_code == 200
    assert [one.path for one in engine.adapters if one.name == "sql"] == [str(folder / "one")]


async def test_an_unusable_adapter_is_a_400_without_its_folder(engine: FakeEngine, folder: Path) -> None:
    engine.refuse = AdapterError("/srv/secret/adapter_config.json: use_dora is not supported")
    async with serving(engine, lora_folders=(str(folder),)) as server:
        response = await server.post("/v1/load_lora_adapter", lora_name="x", lora_path="one")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "adapter_refused")
    assert "use_dora" in error["message"]
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_loading_is_off_by_default(path: str, folder: Path) -> None:
    engine = FakeEngine()
    engine.adapters = [adapter_info("sql", "sql")]
    async with serving(engine, lora_folders=(str(folder),)) as server:
        response = await server.post(path, lora_name="sql", lora_path="one")
    assert response.status_code == 404
    assert "lora_loading" in response.json()["error"]["message"]
    assert len(engine.adapters) == 1


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_adapters_need_the_key(engine: FakeEngine, path: str) -> None:
    async with serving(engine, api_keys=("secret",)) as server:
        assert (await server.post(path, lora_name="sql", lora_path="one")).status_code == 401
    assert len(engine.adapters) == 2


# ---- allowed paths -------------------------------------------------------------------------------------------


def test_paths_below_the_folders(folder: Path) -> None:
    (folder / "deep/two/weights").symlink_to(folder / "deep/two")
    folders = AdapterFolders(("/nowhere", str(folder)), hub=False)
    assert folders.find("one") == folders.find(str(folder / "one")) == str(folder / "one")
    assert folders.find("deep/two") == folders.find("one/../deep/./two") == str(folder / "deep/two")


@pytest.mark.parametrize(
    "path",
    [
        "../beside",
        "/etc",
        "one/../../beside",
        "out",
        "~",
        "a\0b",
        "x" * 4000,
        "loop",
        "owner/name",
        "a-file",
        "a-folder",
        "a-neighbour",
    ],
)
def test_paths_elsewhere_and_missing_paths_get_the_same_answer(folder: Path, path: str) -> None:
    (folder / "out").symlink_to(folder.parent / "beside")
    (folder / "loop").symlink_to(folder / "loop")
    for name in ("a-file", "a-folder/deep"):  # links in an adapter's folder
        (folder / name).mkdir(parents=True)
        (folder / name / "adapter_model.safetensors").symlink_to(folder.parent / "beside" / "secret")
    (folder / "a-neighbour").mkdir()
    (folder / "a-neighbour" / "adapter_model.safetensors").symlink_to(folder / "one")
    folders = AdapterFolders((str(folder),), hub=False)
    with pytest.raises(HTTPError) as elsewhere:
        folders.find(path)
    with pytest.raises(HTTPError) as nowhere:
        folders.find("nowhere")
    assert (elsewhere.value.status, str(elsewhere.value)) == (404, str(nowhere.value))


def test_a_snapshot_of_the_hub_is_found_below_its_cache_or_its_snapshots(tmp_path: Path) -> None:
    repository = tmp_path / "models--some--adapter"
    snapshot = repository / "snapshots" / "abc"
    for made in (snapshot, repository / "blobs"):
        made.mkdir(parents=True)
    (snapshot / "adapter_config.json").symlink_to("../../blobs/1")
    for top in (tmp_path, repository / "snapshots"):
        path = str(snapshot.relative_to(top))
        assert AdapterFolders((str(top),), hub=False).find(path) == str(snapshot)


def test_hugging_face_ids_need_the_knob(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert AdapterFolders((), hub=True).find("owner/name") == "owner/name"
    for path in ("owner", "/owner/name", "../owner/name", "owner/name/more", "owner/na me"):
        with pytest.raises(HTTPError):
            AdapterFolders((), hub=True).find(path)
    monkeypatch.chdir(tmp_path)
    os.makedirs("owner/name")  # an existing path would be read instead of the id
    with pytest.raises(HTTPError):
        AdapterFolders((), hub=True).find("owner/name")


def test_knobs_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="lora_folders"):
        check_names(EngineConfig(lora_loading=True), ServerConfig())
    with pytest.raises(ConfigError, match="served_model_name"):
        check_names(EngineConfig(lora={"mine": "x"}), ServerConfig(served_model_name=("other", "mine")))
    check_names(EngineConfig(lora_loading=True, lora={"a": "x"}), ServerConfig(lora_hub=True))


# ---- metrics, the client, and a real engine -------------------------------------------------------------------


async def _metrics(server: Server) -> str:
    return (await server.client.get("/metrics")).text


async def test_metrics(engine: FakeEngine) -> None:
    engine.numbers = msgspec.structs.replace(engine.numbers, adapter_places=4, adapter_loads=7, adapter_evictions=3)
    async with serving(engine, vllm_metrics=True) as server:
        reported = await _metrics(server)
    for line in (
        "aengine_adapters 2.0",
        "aengine_adapters_on_device 1.0",
        "aengine_adapter_places 4.0",
        "aengine_adapter_loads_total 7.0",
        "aengine_adapter_evictions_total 3.0",
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="sql",waiting_lora_adapters="org/law"}',
    ):
        assert line in reported
    async with serving(vllm_metrics=True) as server:
        assert "adapter" not in await _metrics(server)


async def test_the_client_has_the_engines_errors(engine: FakeEngine, folder: Path) -> None:
    async with serving(engine, lora_folders=(str(folder),)) as server, Client(server.url) as client:
        await client.load_adapter("new", "one")
        await client.complete("x", adapter="new")
        assert engine.submitted[0].options["adapter"] == "new"
        with pytest.raises(InvalidRequestError, match=r"^name") as refused:
            await client.load_adapter("new", "one")
        assert refused.value.param == "name"
        await client.load_adapter("new", "one", replace=True)
        await client.unload_adapter("new")
        with pytest.raises(ModelNotFoundError):
            await client.unload_adapter("new")
        with pytest.raises(ModelNotFoundError):
            await client.complete("x", adapter="new")
        with pytest.raises(ServerError, match="lora_path"):
            await client.load_adapter("x", "../beside")
        engine.refuse = AdapterError("use_dora is not supported")
        with pytest.raises(AdapterError, match="use_dora"):
            await client.load_adapter("x", "one")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("adapters"), 2)


@pytest.mark.slow
async def test_a_server_with_real_adapters(written: Written) -> None:
    engine = DemoEngine(lora={"first": written.paths["a0"]}, lora_loading=True)
    async with hosted_demo(engine, lora_folders=(str(written.folder),)) as url, Client(url) as client:
        first = await client.complete(PROMPT, adapter="first", **GREEDY)
        assert list(first.token_ids) == written.greedy(written.merged, PROMPT, 12)
        with pytest.raises(AdapterError, match="IA3"):
            await client.load_adapter("second", Path(written.refused()).name)
        running = await client.submit(PROMPT, adapter="first", **GREEDY | {"max_tokens": 200})
        await client.load_adapter("second", "a1")
        second = await client.complete(PROMPT, adapter="second", **GREEDY)
        assert second.token_ids not in (first.token_ids, (await client.complete(PROMPT, **GREEDY)).token_ids)
        await client.unload_adapter("second")
        with pytest.raises(ModelNotFoundError):
            await client.complete(PROMPT, adapter="second")
        running.abort()


@pytest.mark.slow
async def test_unloading_continues_after_its_client_has_left(written: Written) -> None:
    engine = DemoEngine(lora={"first": written.paths["a0"]}, lora_loading=True)
    async with hosted_demo(engine, lora_folders=(str(written.folder),)) as url, Client(url) as client:
        running = await client.submit(PROMPT, adapter="first", **GREEDY | {"max_tokens": 150})
        await running.take()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.unload_adapter, "first")
            with anyio.fail_after(30):
                while engine.has_adapter("first"):  # noqa: ASYNC110 - the engine has no event for it
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with pytest.raises(ModelNotFoundError):
            await client.complete(PROMPT, adapter="first")
        with pytest.raises(ModelNotFoundError):
            await client.unload_adapter("first")
        pieces = 0
        while await running.take():
            pieces += 1
        assert pieces > 0  # a running request keeps its adapter
        await client.load_adapter("first", "a0")
        again = await client.complete(PROMPT, adapter="first", **GREEDY)
        assert list(again.token_ids) == written.greedy(written.merged, PROMPT, 12)

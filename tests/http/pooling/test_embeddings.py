"""`/v1/embeddings` and `/classify` on small checkpoints, with and without OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

import aengine
from aengine.client import Client
from tests.engine.conftest import idle
from tests.engine.pooling.checkpoints import HIDDEN, hidden_states, write
from tests.http.demo_server import DemoEngine, hosted_demo
from tests.http.serving import raw_request
from tests.model.lora.adapters import write_adapter

pytestmark = pytest.mark.anyio

TEXTS = ["The capital of France", "One two three", "The capital of France"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-embedding")
    write(folder, "qwen3", "none", is_matryoshka=True)
    return folder


@pytest.fixture
async def engine(folder: Path) -> DemoEngine:
    return DemoEngine(model=str(folder), max_model_len=256, num_pages=200, kv_cache_gib=None)


@pytest.fixture
async def client(engine: DemoEngine) -> AsyncIterator[httpx2.AsyncClient]:
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client
        await idle(engine)


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-4)


async def test_openais_client_in_both_encodings(engine: DemoEngine, client: httpx2.AsyncClient, tmp_path: Path) -> None:
    model = write(tmp_path, "qwen3", "none", is_matryoshka=True)
    name = engine.model_name
    async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as sdk:
        floats = await sdk.embeddings.create(model=name, input=TEXTS, encoding_format="float")
        default = await sdk.embeddings.create(model=name, input=TEXTS)  # requests base64 and decodes it
        short = await sdk.embeddings.create(model=name, input=TEXTS[0], dimensions=8)
        ids = [engine.tokenizer.encode_now(text) for text in TEXTS]
        by_ids = await sdk.embeddings.create(model=name, input=ids)
        one = await sdk.embeddings.create(model=name, input=ids[0])
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.embeddings.create(model=name, input=TEXTS, dimensions=HIDDEN + 1)
        with pytest.raises(openai.NotFoundError):
            await sdk.embeddings.create(model="other", input="a")
    assert refused.value.param == "dimensions"
    for place, token_ids in enumerate(ids):
        state = hidden_states(model, token_ids)[-1].double()
        expected = close((state / state.norm()).tolist())
        for found in (floats, default, by_ids):
            assert found.data[place].index == place
            assert found.data[place].embedding == expected
    assert one.data[0].embedding == close(default.data[0].embedding)
    cut = np.asarray(default.data[0].embedding[:8])
    assert short.data[0].embedding == close((cut / np.linalg.norm(cut)).tolist())
    assert default.usage.prompt_tokens == default.usage.total_tokens == sum(map(len, ids))


async def test_the_answer_by_hand(client: httpx2.AsyncClient, engine: DemoEngine) -> None:
    answer = await client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64", "user": "me"})
    body = answer.json()
    assert answer.headers["content-type"] == "application/json"
    vector = np.frombuffer(base64.b64decode(body["data"][0].pop("embedding")), "<f4")
    assert np.linalg.norm(vector) == close(1.0)
    tokens = len(engine.tokenizer.encode_now(TEXTS[0]))
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": engine.model_name,
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    floats = (await client.post("/embeddings", json={"input": [TEXTS[0]]})).json()["data"][0]["embedding"]
    assert floats == close(vector.tolist())
    raw = (await client.post("/embeddings", json={"input": TEXTS[0], "normalize": False})).json()
    assert np.linalg.norm(raw["data"][0]["embedding"]) > 1.1


async def test_prompts_are_truncated_on_request(client: httpx2.AsyncClient, engine: DemoEngine) -> None:
    ids = engine.tokenizer.encode_now("one two three four five " * 200)

    async def ask(**fields: Any) -> tuple[int, list[float]]:
        body = (await client.post("/v1/embeddings", json={"input": ids, **fields})).json()
        return body["usage"]["prompt_tokens"], body["data"][0]["embedding"]

    refused = await client.post("/v1/embeddings", json={"input": ids})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["param"] == "input"
    assert await ask(truncate_prompt_tokens=5) == (5, close((await ask(input=ids[-5:]))[1]))
    assert (await ask(truncate_prompt_tokens=-1))[0] == 256
    assert (await ask(truncate_prompt_tokens=5, input="one two three four five " * 200))[0] == 5


async def test_hopeless_texts_are_not_tokenized(
    engine: DemoEngine, client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = engine.tokenizer.encode_now("one two three four" * 100, add_special_tokens=False)
    fits = {"input": engine.tokenizer.decode(ids[:200]), "add_special_tokens": False}
    assert (await client.post("/v1/embeddings", json=fits)).status_code == 200

    def tokenized(*given: object) -> None:
        raise AssertionError

    monkeypatch.setattr(engine.tokenizer, "_encode", tokenized)
    for special in (True, False):
        requested = {"input": ["one two " * 50_000], "add_special_tokens": special}
        answer = await client.post("/v1/embeddings", json=requested)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "input"
        assert error["message"].startswith("This model's maximum context length is 256 tokens. However, at least ")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", [1]], "model": "other"}, "model"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [10**9]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": 5}, "input"),
        ({}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": [{}]}, "messages"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "priority": 2**63}, "priority"),
    ],
)
async def test_refusals_name_the_field(client: httpx2.AsyncClient, fields: dict[str, Any], param: str) -> None:
    answer = await client.post("/v1/embeddings", json=fields)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


async def test_unsupported_endpoints_are_refused_with_a_reason(client: httpx2.AsyncClient) -> None:
    generating = await client.post("/v1/completions", json={"prompt": "a"})
    classifying = await client.post("/classify", json={"input": "a"})
    assert (generating.status_code, classifying.status_code) == (400, 400)
    assert "generates nothing" in generating.json()["error"]["message"]
    assert "classification head" in classifying.json()["error"]["message"]


async def test_a_client_that_leaves_gives_everything_back(client: httpx2.AsyncClient, engine: DemoEngine) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    writer.write(raw_request("/v1/embeddings", {"input": [[number % 4000] * 250 for number in range(1000)]}))
    await writer.drain()
    async with asyncio.timeout(30):
        while not engine.stats().running:  # noqa: ASYNC110 - the engine has no such event
            await asyncio.sleep(0.001)
        writer.close()
        while engine.stats().running or engine.stats().waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert engine.stats().prompt_tokens < 250_000
    assert (await client.post("/v1/embeddings", json={"input": "a"})).status_code == 200


async def test_a_full_queue_is_a_503(folder: Path) -> None:
    engine = DemoEngine(model=str(folder), max_queue=4, max_num_seqs=1, num_pages=200, kv_cache_gib=None)
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        many = asyncio.ensure_future(client.post("/v1/embeddings", json={"input": [[5] * 400] * 100}))
        async with asyncio.timeout(30):
            while not engine.stats().waiting:  # noqa: ASYNC110 - the engine has no such event
                await asyncio.sleep(0.001)
        refused = await client.post("/v1/embeddings", json={"input": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert len((await many).json()["data"]) == 100
        await idle(engine)


async def test_metrics_count_prompt_tokens_and_requests(client: httpx2.AsyncClient) -> None:
    usage = (await client.post("/v1/embeddings", json={"input": TEXTS})).json()["usage"]
    text = (await client.get("/metrics")).text
    assert f"aengine_prompt_tokens_total {float(usage['prompt_tokens'])}" in text
    assert "aengine_requests_total 1.0" in text
    assert "aengine_generated_tokens_total 0.0" in text
    assert 'path="/v1/embeddings",status="200"} 1.0' in text


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-classifier")
    write(folder, "qwen2", "classes", id2label={0: "bad", 1: "fine", 2: "good"})
    return folder


async def test_the_models_name_chooses_an_adapter(folder: Path, tmp_path: Path) -> None:
    base = write(tmp_path / "base", "qwen3", "none", is_matryoshka=True)
    merged = write_adapter(base, tmp_path / "law", task_type="FEATURE_EXTRACTION")
    engine = DemoEngine(
        model=str(folder), max_model_len=256, num_pages=200, kv_cache_gib=None, lora={"law": str(tmp_path / "law")}
    )
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        for name, model in (("law", merged), (engine.model_name, base)):
            answer = (await client.post("/v1/embeddings", json={"input": TEXTS[:1], "model": name})).json()
            vector = hidden_states(model, engine.tokenizer.encode_now(TEXTS[0]))[-1]
            assert answer["model"] == name
            assert answer["data"][0]["embedding"] == close((vector / vector.norm()).tolist())
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
            refused = await client.post(path, json={**body, "model": "nolaw"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        async with Client(url) as remote:
            assert list((await remote.embed(TEXTS[0], adapter="law")).vectors[0]) == list(
                (await engine.embed(TEXTS[0], adapter="law")).vectors[0]
            )
        await idle(engine)


async def test_classes(classifier: Path) -> None:
    engine = DemoEngine(model=str(classifier), max_model_len=256, num_pages=200, kv_cache_gib=None)
    async with hosted_demo(engine) as url:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            body = (await client.post("/classify", json={"input": TEXTS})).json()
            refused = await client.post("/score", json={"text_1": "a", "text_2": "b"})
        found: aengine.Classes = await engine.classify(TEXTS)
        for place, (data, one) in enumerate(zip(body["data"], found.results, strict=True)):
            assert data == {"index": place, "label": one.label, "probs": close(one.probabilities), "num_classes": 3}
            assert sum(data["probs"]) == close(1.0)
        assert body["object"] == "list"
        assert refused.status_code == 400
        assert "3 classes" in refused.json()["error"]["message"]
        await idle(engine)

"""`/score` and `/rerank` in the formats of vLLM, Jina and Cohere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.engine.conftest import idle
from tests.engine.pooling.checkpoints import write
from tests.http.demo_server import DemoEngine, hosted_demo

pytestmark = pytest.mark.anyio

QUERY = "What is the capital of France?"
DOCUMENTS = ["Berlin", "Paris is the capital of France.", "One two three"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-tiny"
    write(folder, "qwen3", "vocabulary", tie_word_embeddings=True)
    return folder


@pytest.fixture
async def engine(folder: Path) -> DemoEngine:
    return DemoEngine(model=str(folder), max_model_len=256, num_pages=400, kv_cache_gib=None)


@pytest.fixture
async def client(engine: DemoEngine) -> AsyncIterator[httpx2.AsyncClient]:
    async with hosted_demo(engine) as url, httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        yield client
        await idle(engine)


def close(values: Any) -> Any:
    return pytest.approx(values, abs=1e-4)


async def ask(client: httpx2.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_one_to_one_one_to_many_and_many_to_many(client: httpx2.AsyncClient, engine: DemoEngine) -> None:
    expected = list((await engine.score(QUERY, DOCUMENTS)).values)
    many = await ask(client, "/score", model=engine.model_name, text_1=QUERY, text_2=DOCUMENTS)
    assert [one["score"] for one in many["data"]] == close(expected)
    assert [(one["index"], one["object"]) for one in many["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    assert (many["object"], many["model"], many["id"][:6]) == ("list", engine.model_name, "score-")
    assert many["usage"]["prompt_tokens"] == many["usage"]["total_tokens"] > 3 * 20
    single = await ask(client, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[1])
    pairs = await ask(client, "/score", queries=[QUERY] * 3, documents=DOCUMENTS)
    assert [one["score"] for one in single["data"]] == close(expected[1:2])
    assert [one["score"] for one in pairs["data"]] == close(expected)
    reported = await ask(client, "/score", text_1=QUERY, text_2=DOCUMENTS, instruction="Find numbers")
    assert [one["score"] for one in reported["data"]] == close(
        list((await engine.score(QUERY, DOCUMENTS, instruction="Find numbers")).values)
    )


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_the_best_first(client: httpx2.AsyncClient, engine: DemoEngine, path: str) -> None:
    scores = (await engine.score(QUERY, DOCUMENTS)).values
    order = sorted(range(3), key=lambda index: -scores[index])
    texts: list[Any] = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
    found = await ask(client, path, model=engine.model_name, query=QUERY, documents=texts)
    assert found["results"] == [
        {"index": index, "document": {"text": DOCUMENTS[index]}, "relevance_score": close(scores[index])}
        for index in order
    ]
    assert found["meta"]["tokens"]["input_tokens"] == found["usage"]["prompt_tokens"] > 0
    two = await ask(client, path, query=QUERY, documents=texts, top_n=2, return_documents=False)
    assert two["results"] == [{"index": index, "relevance_score": close(scores[index])} for index in order[:2]]
    assert len((await ask(client, path, query=QUERY, documents=texts, top_n=0))["results"]) == 3


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"documents": "a"}, "queries"),
        ("/score", {}, "text_1"),
        ("/score", {"text_1": "a", "text_2": "b", "queries": "a"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a"] * 3}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b " * 999}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/score", {"text_1": "", "text_2": "b"}, "text_1"),
        ("/score", {"queries": ["a", ""], "documents": ["a", "b"]}, "queries"),
        ("/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a"}, "documents"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b " * 999]}, "documents"),
    ],
)
async def test_refusals_name_the_field(
    client: httpx2.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param

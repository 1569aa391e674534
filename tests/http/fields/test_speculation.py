"""The field `speculation` of every request that generates: false drafts no token ahead for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"prompt": "hello", "stream": False},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "hello"},
    "/v1/messages": CHAT,
}
every_path = pytest.mark.parametrize("path", BODIES)


@every_path
async def test_it_reaches_the_engine(path: str) -> None:
    async with serving() as server:
        for given in ({}, {"speculation": None}, {"speculation": True}, {"speculation": False}):
            assert (await server.post(path, **BODIES[path], **given)).status_code == 200
    assert [one.params.speculation for one in server.engine.submitted] == [True, True, True, False]


@every_path
@pytest.mark.parametrize("value", ["off", 0, {}])
async def test_a_value_of_another_type_is_refused_by_name(path: str, value: object) -> None:
    async with serving() as server:
        answer = await server.post(path, **BODIES[path], speculation=value)
    assert answer.status_code == 400
    assert "speculation" in answer.json()["error"]["message"]
    assert server.engine.submitted == []


async def test_the_openapi_document_has_it_for_requests_that_generate() -> None:
    async with serving() as server:
        document = (await server.client.get("/openapi.json")).json()

    def fields(path: str) -> dict[str, Any]:
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema: dict[str, Any] = document["components"]["schemas"][reference.rpartition("/")[2]]
        return dict(schema["properties"])

    for path in BODIES:
        assert {"type": "boolean"} in fields(path)["speculation"]["anyOf"]
    for path in ("/v1/embeddings", "/rerank", "/tokenize", "/v1/messages/count_tokens"):
        assert "speculation" not in fields(path)

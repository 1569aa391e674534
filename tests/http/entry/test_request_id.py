"""`X-Request-Id` of requests and answers."""

from __future__ import annotations

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio


async def test_the_clients_id_comes_back_in_every_answer() -> None:
    own = {"X-Request-Id": "trace-1"}
    async with serving() as server:
        answers = [
            await server.client.post("/generate", json={"prompt": "a"}, headers=own),
            await server.client.post("/generate", json={}, headers=own),
            await server.client.get("/nowhere", headers=own),
            await server.client.get("/health", headers=own | {"Origin": "http://evil.example"}),
        ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["trace-1"] * 4


@pytest.mark.parametrize("unusable", ["", "with space", "é", "x" * 129])
async def test_an_unusable_id_is_replaced(unusable: str) -> None:
    async with serving() as server:
        first = await server.client.get("/health", headers={"X-Request-Id": unusable.encode("latin-1")})  # type: ignore[dict-item]
        second = await server.client.get("/health")
    ids = {first.headers["x-request-id"], second.headers["x-request-id"]}
    assert len(ids) == 2
    assert all(len(one) == 32 and one.isalnum() for one in ids)


async def test_the_same_id_twice_at_once_is_two_requests() -> None:
    own = {"X-Request-Id": "retry"}
    async with serving() as server:
        for _ in range(2):
            await server.client.post("/generate", json={"prompt": "a"}, headers=own)
        first, second = server.engine.submitted
    assert first.options["request_id"] != second.options["request_id"]

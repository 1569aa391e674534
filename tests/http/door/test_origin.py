"""Web pages: a foreign one is refused unless the operator allows its origin."""

from __future__ import annotations

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type,x-mine",
}


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1", "http://[", "http://127.0.0.1:x"],
)
async def test_a_foreign_page_is_refused(origin: str) -> None:
    async with serving() as server:
        post = await server.client.post("/generate", json={"prompt": "a"}, headers={"Origin": origin})
        get = await server.client.get("/health", headers={"Origin": origin})
        preflight = await server.client.options("/generate", headers={"Origin": origin, **PREFLIGHT})
        assert server.engine.submitted == []
    for response in (post, get, preflight):
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_not_allowed"
        assert "access-control-allow-origin" not in response.headers


async def test_the_servers_own_page_and_programs_are_not() -> None:
    async with serving() as server:
        own = await server.client.get("/health", headers={"Origin": server.url})
        none = await server.client.get("/health")
        default_port = await server.client.get(
            "/health", headers={"Origin": "https://me.example", "Host": "me.example:443"}
        )
    assert own.status_code == none.status_code == default_port.status_code == 200
    assert "access-control-allow-origin" not in own.headers


@pytest.mark.parametrize("allowed", ["https://page.example", "*"])
async def test_an_allowed_page_may_call_and_read(allowed: str) -> None:
    page = {"Origin": "https://page.example"}
    async with serving(allowed_origins=(allowed,)) as server:
        preflight = await server.client.options("/generate", headers=page | PREFLIGHT)
        streamed = await server.client.post("/generate", json={"prompt": "a"}, headers=page)
        refused = await server.client.post("/generate", json={}, headers=page)
        other = await server.client.get("/health", headers={"Origin": "https://other.example"})
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-headers"] == "content-type,x-mine"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert (streamed.status_code, refused.status_code) == (200, 400)
    for response in (preflight, streamed, refused):
        assert response.headers["access-control-allow-origin"] == "https://page.example"
        assert "Origin" in response.headers["vary"]
    assert other.status_code == (200 if allowed == "*" else 403)

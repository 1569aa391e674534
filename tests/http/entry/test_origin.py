"""Web pages: a foreign page is refused unless its origin is allowed."""

from __future__ import annotations

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio

PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "content-type,x-mine",
    "Access-Control-Request-Private-Network": "true",  # a page on the internet calls a server in a private network
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
        by_name = await server.client.get("/health", headers={"Origin": "http://localhost:80", "Host": "localhost"})
    assert own.status_code == none.status_code == by_name.status_code == 200
    assert "access-control-allow-origin" not in own.headers


async def test_a_page_whose_name_was_made_to_lead_here_is_not_the_servers_own() -> None:
    """DNS rebinding: `Origin` and `Host` agree on a name that is not this server's."""
    async with serving() as server:
        headers = {"Origin": f"http://evil.example:{server.port}", "Host": f"evil.example:{server.port}"}
        rebound = await server.client.post("/generate", json={"prompt": "a"}, headers=headers)
        assert server.engine.submitted == []
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")


async def test_a_page_from_a_proxy_in_allowed_hosts() -> None:
    proxied = {"Origin": "https://me.example", "Host": "me.example:443"}
    async with serving(allowed_hosts=("me.example",)) as server:
        own = await server.client.get("/health", headers=proxied)
        foreign = await server.client.get("/health", headers=proxied | {"Origin": "https://evil.example"})
    assert (own.status_code, foreign.status_code) == (200, 403)


@pytest.mark.parametrize("allowed", ["https://page.example", "*"])
async def test_an_allowed_page_may_call_and_read(allowed: str) -> None:
    page = {"Origin": "https://page.example"}
    async with serving(allowed_origins=(allowed,)) as server:
        preflight = await server.client.options("/generate", headers=page | PREFLIGHT)
        streamed = await server.client.post("/generate", json={"prompt": "a"}, headers=page)
        refused = await server.client.post("/generate", json={}, headers=page)
        other = await server.client.get("/health", headers={"Origin": "https://other.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "content-type,x-mine"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert (streamed.status_code, refused.status_code) == (200, 400)
    for response in (preflight, streamed, refused):
        assert response.headers["access-control-allow-origin"] in (allowed, "https://page.example")
        assert "Origin" in response.headers["vary"]
    assert "retry-after" in streamed.headers["access-control-expose-headers"]
    assert other.status_code == (200 if allowed == "*" else 403)

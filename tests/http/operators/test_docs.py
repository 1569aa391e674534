"""`GET /docs`, and paths that clients of other servers use."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

import pytest

from tests.http.serving import serving

pytestmark = pytest.mark.anyio


async def test_the_page_shows_the_whole_document_and_loads_nothing() -> None:
    async with serving() as server:
        page = await server.client.get("/docs")
        document = (await server.client.get("/openapi.json")).json()
    assert page.headers["content-type"].startswith("text/html")
    for path in document["paths"]:
        assert f"<code>{path}</code>" in page.text
    for name in document["components"]["schemas"]["ChatRequest"]["properties"]:
        assert f"<code>{name}</code>" in page.text
    assert not re.search(r"<script|<img|<link|src=|https?://", page.text)
    style = re.search(r"<style>(.*?)</style>", page.text)
    assert style is not None
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert b64encode(sha256(style[1].encode()).digest()).decode() in policy


async def test_the_page_needs_the_key() -> None:
    async with serving(api_keys=("secret",)) as server:
        assert (await server.client.get("/docs")).status_code == 401
        assert (await server.client.get("/docs", headers={"x-api-key": "secret"})).status_code == 200
        assert (await server.client.get("/ping")).status_code == 200


async def test_paths_of_other_servers() -> None:
    async with serving() as server:
        ping, health = [await server.client.get(path) for path in ("/ping", "/health")]
        assert (ping.status_code, ping.json()) == (health.status_code, health.json())
        assert (await server.client.post("/reset_prefix_cache?reset_running_requests=true")).status_code == 200
        assert server.engine.flushed == 1
        compact = await server.post("/v1/responses/compact", input="a", model="fake")
        assert (compact.status_code, compact.json()["error"]["code"]) == (404, "not_found")

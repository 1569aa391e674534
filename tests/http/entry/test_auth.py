"""API keys: open paths, protected paths, and attempts to get around the key."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from aengine.http.entry.auth import ApiKeyMiddleware
from tests.http.serving import Server, read_until, serving

pytestmark = pytest.mark.anyio

KEYS = ("first-key", "clé", "third")
KEY = {"Authorization": "Bearer first-key"}


async def raw_status(server: Server, head: str) -> str:
    """Return the status of a request whose head is sent unchanged."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode("latin-1"))
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer.split(b" ", 2)[1].decode()


async def test_everything_is_open_without_keys() -> None:
    async with serving() as server:
        assert (await server.client.get("/v1/models")).status_code == 200
        assert (await server.client.get("/v1/models", headers={"Authorization": "Bearer x"})).status_code == 200


async def test_with_keys_only_the_open_paths_answer_strangers() -> None:
    async with serving(api_keys=KEYS) as server:
        for path in ("/health", "/ready"):
            assert (await server.client.get(path)).status_code == 200
        assert (await server.client.get("/")).status_code != 401
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
            assert (await server.client.get(path)).status_code == 401, path
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/abort", "/flush_cache"):
            refusal = await server.post(path, prompt="a")
            assert refusal.status_code == 401, path
            assert server.engine.submitted == []
    assert refusal.headers["www-authenticate"] == "Bearer"
    assert refusal.headers["x-request-id"]
    assert refusal.json()["error"] | {"message": ""} == {
        "message": "",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


CHAT = {"messages": [{"role": "user", "content": "a"}]}
GENERATING = {
    "/generate": {"prompt": "a"},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "a"},
    "/v1/messages": {**CHAT, "max_tokens": 1},
}


@pytest.mark.parametrize("path", GENERATING)
async def test_several_keys_share_no_cached_prefix(path: str) -> None:
    async with serving(api_keys=KEYS) as server:
        for key in ("first-key", "third"):
            for salt in ({}, {}, {"cache_salt": "own"}):
                body = {**GENERATING[path], **salt}
                answer = await server.client.post(path, json=body, headers={"x-api-key": key})
                assert answer.status_code == 200, answer.text
        salts = [one.options["cache_salt"] for one in server.engine.submitted]
    assert None not in salts
    assert [salts.index(salt) for salt in salts] == [0, 0, 2, 3, 3, 5]


@pytest.mark.parametrize(
    ("config", "shared"),
    [
        ({"api_keys": ("first-key",)}, True),
        ({"api_keys": ("first-key", "first-key")}, True),
        ({"api_keys": KEYS, "salt_by_key": False}, True),
        ({"api_keys": ("first-key",), "salt_by_key": True}, False),
    ],
)
async def test_the_knob_decides_whether_keys_share_the_cache(config: dict[str, Any], shared: bool) -> None:
    async with serving(**config) as server:
        for salt in ({}, {"cache_salt": "own"}):
            answer = await server.client.post("/generate", json={"prompt": "a", **salt}, headers=KEY)
            assert answer.status_code == 200
        salts = [one.options["cache_salt"] for one in server.engine.submitted]
    assert (salts == [None, "own"]) == shared


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
async def test_any_of_the_keys_opens(key: str, scheme: str) -> None:
    async with serving(api_keys=KEYS) as server:
        header = [(b"Authorization", f"{scheme} {key}".encode())]
        assert (await server.client.get("/v1/models", headers=header)).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        *("", "Bearer", "first-key", "Basic first-key", "Bearer first-ke", "Bearer first-key2"),
        *("Bearer first-key,third", "Bearer first-key third", "Bearer:first-key", "first-key Bearer"),
    ],
)
async def test_nothing_else_does(given: str) -> None:
    async with serving(api_keys=KEYS) as server:
        assert (await server.client.get("/v1/models", headers={"Authorization": given})).status_code == 401


async def test_two_authorization_headers_are_refused() -> None:
    async with serving(api_keys=KEYS) as server:
        headers = [("Authorization", "Bearer wrong"), ("Authorization", "Bearer first-key")]
        assert (await server.client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("key", ["first-key", "third"])
async def test_the_key_may_come_as_anthropics_clients_send_it(key: str) -> None:
    async with serving(api_keys=KEYS) as server:
        for path in ("/v1/models", "/v1/messages", "/metrics"):
            assert (await server.client.get(path, headers={"x-api-key": key})).status_code != 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "first-ke")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "Bearer first-key")], 401),
        ([("x-api-key", "wrong"), ("x-api-key", "first-key")], 401),
        ([("x-api-key", "wrong"), ("Authorization", "Bearer wrong")], 401),
        ([("x-api-key", "wrong"), ("Authorization", "Basic first-key")], 401),
        # A client sends both if both variables are set:
        ([("x-api-key", "first-key"), ("Authorization", "Bearer wrong")], 200),
        ([("x-api-key", "wrong"), ("Authorization", "Bearer first-key")], 200),
        ([("x-api-key", "wrong"), ("Authorization", "Bearer first-key"), ("Authorization", "Bearer third")], 401),
    ],
)
async def test_one_good_key_of_two_headers_will_do(headers: list[tuple[str, str]], status: int) -> None:
    async with serving(api_keys=KEYS) as server:
        assert (await server.client.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize(
    "target",
    [
        "//health/../v1/models",
        "/health/../v1/models",
        "/health%2f..%2fv1%2fmodels",
        "/health/..%2fv1/models",
        "/health/",
        "/health.",
        "/health/.",
        "/health;/v1/models",
        "/health%00",
        "/health%2f",
        "/HEALTH",
        "/./v1/models",
        "//",
        "/v1/models?path=/health",
        "/v1/models?/health",
        "/v1/models#/health",
        "http://127.0.0.1/v1/models",
        "http://health/v1/models",
        "*",
    ],
)
async def test_no_spelling_of_a_path_leads_around(target: str) -> None:
    async with serving(api_keys=KEYS) as server:
        status = await raw_status(server, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1")
    assert status in ("401", "400")


@pytest.mark.parametrize(
    "headers",
    [
        "Host: health",
        "Host: /health",
        "Host: 127.0.0.1\r\nX-Forwarded-Prefix: /health",
        "Host: x\r\nX-Original-URL: /health",
    ],
)
async def test_no_header_leads_around(headers: str) -> None:
    async with serving(api_keys=KEYS, allowed_hosts=("*",)) as server:
        assert await raw_status(server, f"GET /v1/models HTTP/1.1\r\n{headers}") == "401"


async def test_a_preflight_needs_no_key_and_a_refusal_can_be_read() -> None:
    page = {"Origin": "https://page.example"}
    async with serving(api_keys=KEYS, allowed_origins=("https://page.example",)) as server:
        preflight = await server.client.options(
            "/v1/models",
            headers=page | {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "authorization"},
        )
        refused = await server.client.get("/v1/models", headers=page)
        allowed = await server.client.get("/v1/models", headers=page | KEY)
        bare = await server.client.options("/v1/models")
        foreign = await server.client.options("/v1/models", headers={"Origin": "https://evil.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-headers"] == "authorization"
    assert (refused.status_code, allowed.status_code) == (401, 200)
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert (bare.status_code, foreign.status_code) == (401, 403)


async def test_a_websocket_is_turned_away() -> None:
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("let in")

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    await ApiKeyMiddleware(app, KEYS)({"type": "websocket", "path": "/health", "headers": []}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_a_stream_with_a_key() -> None:
    async with serving(api_keys=KEYS) as server:
        raw = await server.connect("/generate", prompt="a")
        assert b" 401 " in await read_until(raw, b"\r\n")
        raw.close()
        response = await server.client.post("/generate", json={"prompt": "a"}, headers=KEY)
        assert response.text.endswith("data: [DONE]\n\n")

"""Aliases of paths, and the answers for paths that do not exist."""

from __future__ import annotations

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.config import ServerConfig
from aengine.http.entry.paths import ServedPaths
from aengine.http.routes import operations
from aengine.http.state import ServerState
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

SERVED = [(one.method, one.path) for one in operations(ServerState(ServerConfig()))] + [("GET", "/")]
PATHS = ServedPaths(SERVED)
PLAIN = [path for _, path in SERVED if "{" not in path]


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/v1/models/", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/v1/models/org/name/", "/v1/models/org/name"),
        ("/v1/tokenize", "/tokenize"),
        ("/generate/", "/v1/generate"),  # an alias
        ("/v1/v1/generate", "/v1/generate"),
    ],
)
def test_aliases(sent: str, meant: str) -> None:
    assert PATHS.canonical(sent) == meant


@pytest.mark.parametrize("path", ["/", "//", "/v1", "/v1/", "/V1/models", "/v2/models", "/chat", "/v1/chat/", "*", ""])
def test_unknown_paths_are_unchanged(path: str) -> None:
    assert PATHS.canonical(path) == path


@given(st.lists(st.sampled_from(["v1", "models", "generate", "health", "x", "", "."])).map("/".join))
def test_it_is_found_or_left_alone(path: str) -> None:
    found = PATHS.canonical(f"/{path}")
    assert found == f"/{path}" or found in PLAIN or found.startswith("/v1/models/")
    assert PATHS.canonical(found) == found
    assert PATHS.canonical("/generate") == "/generate"


@pytest.mark.parametrize("base", ["", "/", "/v1", "/v1/", "/v1/v1"])
async def test_a_client_may_have_any_base_url(base: str) -> None:
    async with serving() as server, openai.AsyncOpenAI(base_url=server.url + base, api_key="-") as client:
        answer = await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "a"}])
        assert answer.choices[0].message.content
        assert [model.id async for model in client.models.list()] == ["fake"]
        assert (await client.models.retrieve("fake")).id == "fake"


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/v1/chat/completion", "did you mean POST /v1/chat/completions?"),
        ("POST", "/V1/Chat/Completions", "did you mean POST /v1/chat/completions?"),
        ("GET", "/model", "did you mean GET /v1/models?"),
        ("POST", "/v1/audio/speech", "GET /openapi.json lists all"),
        ("GET", "/tokenise", "did you mean POST /tokenize?"),
        (
            "POST",
            "/v1/chat/completions/chat/completions",
            "did you mean POST /v1/chat/completions?",
        ),  # a base URL with the path
        ("GET", "/v1/chat/completions/models", "did you mean GET /v1/models?"),
        ("POST", "/v1/chat", "did you mean POST /v1/chat/completions?"),
        ("POST", "/v1", "GET /openapi.json lists all"),
    ],
)
async def test_an_unknown_path(method: str, path: str, said: str) -> None:
    async with serving() as server:
        response = await server.client.request(method, path)
    assert response.status_code == 404
    assert response.json()["error"] == {
        "message": f"{method} {path}: there is no such path here; {said}",
        "type": "invalid_request_error",
        "param": None,
        "code": "not_found",
    }


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", "/v1/chat/completions", "POST"), ("PUT", "/generate", "POST"), ("POST", "/health", "GET, HEAD")],
)
async def test_a_wrong_method(method: str, path: str, allowed: str) -> None:
    async with serving() as server:
        response = await server.client.request(method, path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], response.headers["allow"]) == (405, "method_not_allowed", allowed)
    assert error["message"] == f"{method} {path}: this path takes {allowed} only"


async def test_the_path_in_an_error_is_short_and_printable() -> None:
    async with serving() as server:
        response = await server.client.get("/%1b%5b31m%0a" + "x" * 9000)
    message = response.json()["error"]["message"]
    assert message.startswith("GET /\\x1b[31m\\nxxx")
    assert len(message) < 300
    assert message.isprintable()

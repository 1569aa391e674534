"""Requests of OpenAI's batch files get the answers of the HTTP server."""

from __future__ import annotations

import json
from array import array
from typing import Any

import httpx2
import msgspec
import pytest

from aengine.cli.generate.requests import answer_request, is_request, post_to
from aengine.client import Client
from aengine.errors import EngineNotReadyError, ServerError
from aengine.types import Embeddings, Usage
from tests.http.fake_engine import FakeEngine
from tests.http.serving import serving

pytestmark = pytest.mark.anyio

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
BODIES: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", CHAT, 200),
    ("/v1/chat/completions", CHAT | {"temperature": 9}, 400),
    ("/v1/completions", {"model": "fake", "prompt": ["a", "b"], "n": 2, "logprobs": 2}, 200),
    ("/v1/completions", {"model": "another", "prompt": "a"}, 404),
    ("/v1/embeddings", {"model": "fake", "input": ["a", [1, 2]], "encoding_format": "base64"}, 200),
]


class Engine(FakeEngine):
    async def embed(self, prompts: Any, **_: Any) -> Embeddings:
        vectors = tuple(array("f", [0.1, number]) for number in range(len(prompts)))
        return Embeddings(vectors, Usage(len(prompts), 0, 0))


FRESH = ("id", "created")  # differ in every answer


def line(**fields: Any) -> bytes:
    asked = {"custom_id": "mine", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    return json.dumps(asked | fields).encode()


def answered(status: int, content: bytes, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, content=content, headers=headers)


def output(result: Any) -> dict[str, Any]:
    """Return the line of output, decoded."""

    encoded = msgspec.json.encode(result.body)
    assert b"\n" not in encoded
    read: dict[str, Any] = json.loads(encoded)
    assert [*read] == ["id", "custom_id", "response", "error"]
    assert read["id"].startswith("batch_req_")
    return read


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(("url", "body", "status"), BODIES)
async def test_answers_are_the_servers(
    url: str, body: dict[str, Any], status: int, remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENGINE_API_KEYS", "secret")  # needed by a server only, not in this process
    async with serving(Engine()) as server, Client(server.url) as client:
        expected = await server.client.post(url, json=body)
        result = await answer_request(post_to(client if remote else Engine()), line(url=url, body=body))  # type: ignore[arg-type]
    read = output(result)
    assert (read["custom_id"], read["error"]) == ("mine", None)
    assert read["response"]["status_code"] == expected.status_code == status
    assert read["response"]["request_id"]
    found, told = read["response"]["body"], expected.json()
    assert {**found, **dict.fromkeys(FRESH)} == {**told, **dict.fromkeys(FRESH)}
    assert result.failed is (status != 200)
    assert result.tokens == told.get("usage", {}).get("completion_tokens", 0)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"method": "GET"}, "method must be POST"),
        ({"url": "/v1/images"}, "/v1/embeddings"),
        ({"body": {"prompt": "x", "stream": True}}, "no streams"),
        ({"body": "x"}, "object"),
        ({"custom_id": 7}, "custom_id"),
    ],
)
async def test_a_bad_request_is_reported_in_its_line(fields: dict[str, Any], reason: str) -> None:
    async def post(path: str, body: bytes) -> httpx2.Response:
        raise AssertionError("nothing is sent")

    result = await answer_request(post, line(**fields))
    read = output(result)
    assert read["custom_id"] == fields.get("custom_id", "mine")
    assert read["response"] is None
    assert reason in read["error"]["message"]
    assert result.failed


async def test_a_full_queue_is_waited_for_and_a_body_is_sent_unchanged() -> None:
    refusal = b'{"error": {"message": "full", "type": "server_error", "code": "queue_full"}}'
    answers = [
        answered(503, refusal, **{"retry-after": "0"}),
        answered(200, b'{\n "usage":\n {"completion_tokens": 3}}'),
    ]
    sent: list[tuple[str, bytes]] = []

    async def post(path: str, body: bytes) -> httpx2.Response:
        sent.append((path, body))
        return answers.pop(0)

    asked = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt":  "x", "big": 1e2}}'
    result = await answer_request(post, asked)
    assert sent == [("/v1/completions", b'{"prompt":  "x", "big": 1e2}')] * 2
    assert output(result)["response"]["body"] == {"usage": {"completion_tokens": 3}}
    assert result.tokens == 3


async def test_an_answer_that_is_no_json_is_text() -> None:
    async def post(path: str, body: bytes) -> httpx2.Response:
        return answered(502, b"<html>\nbad gateway")

    result = await answer_request(post, line())
    assert output(result)["response"]["body"] == "<html>\nbad gateway"
    assert result.failed


async def test_a_server_that_serves_no_more_ends_the_run() -> None:
    refusal = b'{"error": {"message": "loading", "type": "server_error", "code": "not_ready"}}'

    async def post(path: str, body: bytes) -> httpx2.Response:
        return answered(503, refusal)

    with pytest.raises(EngineNotReadyError):
        await answer_request(post, line())
    async with Client("http://127.0.0.1:9") as client:
        with pytest.raises(ServerError, match="cannot be reached"):
            await answer_request(post_to(client), line())


def test_which_lines_are_requests() -> None:
    assert is_request(line())
    for other in (
        b'"custom_id"',
        b'{"prompt": "\\"custom_id\\" is a field"}',
        b'{"custom_id"',
        b'\xff"custom_id"',
        b"7",
    ):
        assert not is_request(other), other

"""Errors: their status, their JSON, and what they do not reveal."""

from __future__ import annotations

import pytest

from aengine.errors import (
    AengineError,
    CheckpointError,
    ContextLengthError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    NonFiniteLogitsError,
    QueueFullError,
)
from aengine.http.entry.errors import MAX_MESSAGE, error_body
from aengine.http.state import public_message
from tests.http.fake_engine import FakeEngine
from tests.http.serving import parse_events, read_until, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (InvalidRequestError("no", "seed"), 400, "invalid_request_error", "seed", None),
        (ContextLengthError("9 > 8", "prompt"), 400, "invalid_request_error", "prompt", "context_length_exceeded"),
        (QueueFullError("full", retry_after=3.0), 503, "server_error", None, "queue_full"),
        (EngineNotReadyError("wait"), 503, "server_error", None, "not_ready"),
        (EngineClosedError("closed"), 503, "server_error", None, "shutting_down"),
        (EngineFailedError("failed"), 500, "server_error", None, "engine_failed"),
        (NonFiniteLogitsError("NaN"), 500, "server_error", None, "engine_failed"),
    ],
)
async def test_a_refusal_of_the_engine_has_its_status(
    error: AengineError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    async with serving(FakeEngine(refuse=error)) as server:
        for path, body in (("/generate", {"prompt": "a"}), ("/v1/completions", {"prompt": "a"})):
            response = await server.post(path, **body)
            assert response.status_code == status
            assert response.json() == {"error": {"message": str(error), "type": kind, "param": param, "code": code}}
            hints = {"queue_full": "3", "not_ready": "1", "shutting_down": "1"}
            assert response.headers.get("retry-after") == hints.get(code or "")


async def test_a_bug_is_reported_only_by_its_type() -> None:
    async with serving(FakeEngine(refuse=KeyError("/home/me/secret"))) as server:
        response = await server.post("/generate", prompt="a")
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "KeyError" in response.text
    assert "secret" not in response.text


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_on_the_way(stream: bool) -> None:
    """An error before the answer begins has a status; a later one is an event."""
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", prompt="a", stream=stream)
        held = await server.engine.next_stream()
        held.fail(EngineFailedError("the step failed at /opt/engine/step.py"))
        answer = (await read_until(raw, b"}}")).decode()
        raw.close()
    assert answer.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 500")
    assert '{"error":{"message":"the step failed at step.py","type":"server_error"' in answer
    assert ("data: {" in answer) == stream


async def test_after_a_failure_the_stream_ends_in_order() -> None:
    engine = FakeEngine(held=True)
    body = {"prompt": "a"}
    async with serving(engine) as server, server.client.stream("POST", "/generate", json=body) as response:
        (await engine.next_stream()).fail(EngineFailedError("lost"))
        events = parse_events((await response.aread()).decode())
    assert [event["error"]["message"] for event in events] == ["lost"]


@pytest.mark.parametrize(
    ("said", "reported"),
    [
        ("/home/me/models/x/config.json: not found", "config.json: not found"),
        ("no '/data/a b/c'", "no 'a b/c'"),
        ("~/models/x is no folder", "x is no folder"),
        (r"C:\models\x\config.json is missing", "config.json is missing"),
        ("Qwen/Qwen3-8B was not found at https://host/path", "Qwen/Qwen3-8B was not found at https://host/path"),
        ("either / or and 3/4", "either / or and 3/4"),
        ("asleep; wake it up (POST /wake_up)", "asleep; wake it up (POST /wake_up)"),
    ],
)
def test_messages_have_no_folders(said: str, reported: str) -> None:
    assert public_message(CheckpointError(said)) == reported


def test_a_refusal_repeats_little_of_the_request() -> None:
    long = "x" * 10 * MAX_MESSAGE
    error = error_body(InvalidRequestError(long, long)).error
    assert error.message == error.param == "x" * MAX_MESSAGE + "..."

"""Every refusal as sent over the wire: status, headers, and the four fields of its error."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Self

import httpx2
import pytest

from aengine.app import create_app
from aengine.config import EngineConfig, ServerConfig
from aengine.errors import (
    CheckpointError,
    ContextLengthError,
    DeviceLostError,
    EngineClosedError,
    EngineFailedError,
    EngineNotReadyError,
    InvalidRequestError,
    ModelNotFoundError,
    NonFiniteLogitsError,
    QueueFullError,
)
from aengine.http.entry.errors import MAX_MESSAGE
from aengine.types import Fragment
from tests.http.fake_engine import FakeEngine
from tests.http.serving import hosting, parse_events, read_until, serving
from tests.http.wire import REQUEST_ID, Answer, answer_of, ask

pytestmark = pytest.mark.anyio

WORK = {"prompt": "a"}
JSON = {"content-type": "application/json", "x-request-id": REQUEST_ID}
INVALID, SERVER = "invalid_request_error", "server_error"


def refusal(status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str) -> Answer:
    kind = INVALID if status < 500 else SERVER
    reported = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, reported, {"error": {"message": message, "type": kind, "param": param, "code": code}})


SOON: dict[str, Any] = {"retry_after": "1"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("no", "seed"), refusal(400, "no", param="seed")),
        (InvalidRequestError("no"), refusal(400, "no")),
        (ContextLengthError("long", "prompt"), refusal(400, "long", param="prompt", code="context_length_exceeded")),
        (CheckpointError("bad"), refusal(400, "bad", param="messages", code="chat_template_refused")),
        (ModelNotFoundError("other"), refusal(404, "other", param="model", code="model_not_found")),
        (QueueFullError("full"), refusal(503, "full", code="queue_full", retry_after="1")),
        (QueueFullError("full", 0.2), refusal(503, "full", code="queue_full", retry_after="1")),
        (QueueFullError("full", 6.6), refusal(503, "full", code="queue_full", retry_after="7")),
        (EngineNotReadyError("wait"), refusal(503, "wait", code="not_ready", retry_after="1")),
        (EngineClosedError("closed"), refusal(503, "closed", code="shutting_down", retry_after="1")),
        (EngineFailedError("failed"), refusal(500, "failed", code="engine_failed")),
        (NonFiniteLogitsError("NaN"), refusal(500, "NaN", code="engine_failed")),
        (
            KeyError("secret"),
            refusal(500, "internal error (KeyError); the server's log has the details", code="internal_error"),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_refusals_of_the_engine(error: Exception, expected: Answer) -> None:
    async with serving(FakeEngine(refuse=error)) as server:
        assert await ask(server, "POST", "/generate", WORK) == expected


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_after_the_answer_has_begun(stream: bool) -> None:
    """An error in a stream is its last event, without [DONE]."""
    engine = FakeEngine(held=True)
    async with serving(engine) as server:
        asking = asyncio.create_task(ask(server, "POST", "/v1/completions", {**WORK, "stream": stream}))
        held = await engine.next_stream()
        held.put(Fragment("x", (1,)))
        held.fail(EngineFailedError("the step failed"))
        answer = await asking
    expected = refusal(500, "the step failed", code="engine_failed")
    if stream:
        assert answer.status == 200
        assert answer.body[0]["choices"][0]["text"] == "x"
        assert answer.body[1:] == [expected.body]
    else:
        assert answer == expected


async def test_long_messages_are_shortened() -> None:
    """Errors repeat parts of the request, which may be megabytes."""
    for length, reported in ((MAX_MESSAGE, "x" * MAX_MESSAGE), (MAX_MESSAGE + 1, "x" * MAX_MESSAGE + "...")):
        async with serving(FakeEngine(refuse=InvalidRequestError("x" * length, "x" * length))) as server:
            assert await ask(server, "POST", "/generate", WORK) == refusal(400, reported, param=reported)
    assert MAX_MESSAGE == 2000


TOO_LONG = "the body must not be longer than 100 bytes"
COMPRESSED = "the body must not be compressed"
NO_JSON = "the body must be JSON, with Content-Type: application/json"
KEY = {"authorization": "Bearer the-key"}
PAGE = {"origin": "http://elsewhere.example"}


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "expected"),
    [
        ("POST", "/generate", b"", KEY, refusal(400, "the body is empty")),
        (
            "POST",
            "/generate",
            b'{"seed": "x"}',
            KEY,
            refusal(400, "seed: Expected `int | null`, got `str`", param="seed"),
        ),
        (
            "POST",
            "/v1/chat/completions",
            b"{}",
            KEY,
            refusal(400, "messages: Object missing required field `messages`", param="messages"),
        ),
        (
            "POST",
            "/v1/completions",
            b'{"prompt": "a", "model": "b"}',
            KEY,
            refusal(
                404,
                "the model 'b' does not exist; this server serves 'fake'",
                param="model",
                code="model_not_found",
            ),
        ),
        (
            "POST",
            "/generate",
            b"x" * 101,
            KEY,
            refusal(413, TOO_LONG, code="body_too_large"),
        ),
        (
            "POST",
            "/generate",
            b"{}",
            {**KEY, "content-type": "text/plain"},
            refusal(415, NO_JSON, code="unsupported_media_type"),
        ),
        (
            "POST",
            "/generate",
            b"{}",
            {**KEY, "content-encoding": "gzip"},
            refusal(415, COMPRESSED, code="unsupported_media_type"),
        ),
        (
            "POST",
            "/generate",
            b"{}",
            {},
            refusal(
                401,
                "an API key is needed: send Authorization: Bearer <key> or x-api-key: <key>",
                code="invalid_api_key",
                www_authenticate="Bearer",
            ),
        ),
        (
            "POST",
            "/generate",
            b"{}",
            {**KEY, **PAGE},
            refusal(
                403,
                "requests from this web page's origin are not allowed: the knob allowed_origins lists allowed origins "
                "(--allowed-origins, AENGINE_ALLOWED_ORIGINS)",
                code="origin_not_allowed",
            ),
        ),
        (
            "GET",
            "/generate",
            None,
            KEY,
            refusal(405, "GET /generate: this path takes POST only", code="method_not_allowed", allow="POST"),
        ),
        (
            "GET",
            "/nowhere",
            None,
            KEY,
            refusal(404, "GET /nowhere: there is no such path here; GET /openapi.json lists all", code="not_found"),
        ),
    ],
)
async def test_refusals_before_routing(
    method: str, path: str, body: bytes | None, headers: dict[str, str], expected: Answer
) -> None:
    async with serving(max_body_bytes=100, api_keys=("the-key",)) as server:
        answer = await ask(server, method, path, body, **headers)
    answer.headers.pop("connection", None)
    assert answer == expected


async def test_a_body_that_does_not_come() -> None:
    async with serving(body_timeout=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nX-Request-Id: an-id\r\n\r\n{")
        answer = (await reader.read()).decode()  # up to the end: the connection is closed
        writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 408")
    assert "\r\nx-request-id: an-id" in head
    assert json.loads(body) == refusal(408, "the body did not arrive within 0.1 seconds", code="body_timeout").body


async def test_an_allowed_page_gets_the_cors_headers() -> None:
    """The browser sends a preflight, and shows the page only the listed headers."""
    async with serving(FakeEngine(refuse=QueueFullError("full")), allowed_origins=(PAGE["origin"],)) as server:
        refused = await ask(server, "POST", "/generate", WORK, **PAGE)
        requested = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
        preflight = await ask(server, "OPTIONS", "/generate", None, **PAGE, **requested)
    cors = {
        "access_control_allow_origin": PAGE["origin"],
        "access_control_expose_headers": "x-request-id, request-id, retry-after",
        "vary": "Origin",
    }
    assert refused == refusal(503, "full", code="queue_full", **SOON, **cors)
    assert preflight == Answer(
        200,
        {
            "access-control-allow-origin": PAGE["origin"],
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": "authorization",
            "access-control-max-age": "600",
            "content-type": "text/plain; charset=utf-8",
            "vary": "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
            "Access-Control-Request-Private-Network",
            "x-request-id": REQUEST_ID,
        },
        "OK",
    )


async def test_a_server_that_loads_and_one_that_leaves() -> None:
    """Work is refused with 503, and so are the requests of routers."""
    loaded, engine = asyncio.Event(), FakeEngine()
    enter = engine.__aenter__

    class Slow(FakeEngine):
        async def __aenter__(self) -> Any:
            await loaded.wait()
            return await enter()

    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: Slow())
    reported = {"X-Request-Id": REQUEST_ID}
    async with (
        hosting(app) as (port, _),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=reported, trust_env=False) as client,
    ):

        async def all_of_it(reason: str, code: str, phase: str) -> None:
            not_kept = {**JSON, "cache-control": "no-store"}
            health = Answer(503, not_kept, {"status": phase, "reason": reason})
            ready = Answer(503, not_kept, {"ready": False, "reason": reason})
            refused = refusal(503, reason, code=code, **SOON)
            assert answer_of(await client.get("/health")) == health
            assert answer_of(await client.get("/ready")) == ready
            assert answer_of(await client.get("/v1/models")) == refused
            assert answer_of(await client.post("/generate", json=WORK)) == refused

        await all_of_it("the model is still loading", "not_ready", "loading")
        loaded.set()
        await app.settled.wait()
        assert (await client.get("/ready")).status_code == 200
        await app.drain()
        await all_of_it("the server is shutting down", "shutting_down", "stopping")


@pytest.mark.parametrize("loaded", [False, True])
async def test_an_engine_that_could_not_be_started_and_one_that_failed(loaded: bool) -> None:
    """The reason has no folders."""

    class Broken(FakeEngine):
        async def __aenter__(self) -> Self:
            if not loaded:
                raise CheckpointError("/home/me/model/config.json: no JSON")
            return await super().__aenter__()

    engine = Broken()
    app = create_app(EngineConfig(), ServerConfig(), engine_factory=lambda config: engine)
    async with (
        hosting(app) as (port, _),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers={"X-Request-Id": REQUEST_ID}) as client,
    ):
        await app.settled.wait()
        if loaded:
            engine.failure = DeviceLostError("the device is lost")
            engine.failed.set()
            await app.failed.wait()
        reason = "the engine failed: the device is lost"
        if not loaded:
            reason = "the engine could not be started: config.json: no JSON"
        refused = answer_of(await client.post("/generate", json=WORK))
        assert refused == refusal(503, reason, code="not_ready", **SOON)
        assert answer_of(await client.get("/health")).body == {"status": "failed", "reason": reason}


async def test_a_cancelled_stream_ends_with_the_reason() -> None:
    async with serving(FakeEngine(held=True)) as server:
        raw = await server.connect("/generate", **WORK)
        (await server.engine.next_stream()).put(Fragment("a", (1,)))
        await read_until(raw, b'"text":"a"')
        server.stop.set()
        rest = (await read_until(raw, b"never")).decode()
        raw.close()
    events = "".join(line + "\n\n" for line in rest.splitlines() if line.startswith("data: "))
    assert parse_events(events) == [refusal(503, "the server is shutting down", code="shutting_down").body]

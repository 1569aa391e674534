"""Lines of OpenAI's batch files. Each is a request to the HTTP API, with the answer of the HTTP server."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import anyio
import httpx2
import msgspec
from msgspec.structs import replace

from aengine.cli.generate.prompts import Result
from aengine.client import Client
from aengine.client.wire import response_error
from aengine.config import ServerConfig
from aengine.config.configure import configure
from aengine.errors import QueueFullError

if TYPE_CHECKING:
    from aengine.engine import Engine

Post = Callable[[str, bytes], Awaitable[httpx2.Response]]  # sends a body to a path

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")


class BatchRequest(msgspec.Struct):
    """A request of a batch file. Other fields are ignored, as at OpenAI."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: Any = None


class _Body(msgspec.Struct):
    stream: bool | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def is_request(line: bytes) -> bool:
    """Return whether a line is a request of a batch file: an object with `custom_id`."""
    if b'"custom_id"' not in line:
        return False
    try:
        return msgspec.json.decode(line, type=_Named).custom_id is not None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def post_to(model: Engine | Client) -> Post:
    """Return a function that sends a request to a `Client`'s server, or to the HTTP application of an `Engine`.

    The application runs in this process, without a socket. It has the server's knobs from the environment, but needs no
    API key.
    """
    if isinstance(model, Client):
        return model.post
    from aengine.http import ServerState, http_app

    state = ServerState(replace(configure(ServerConfig), api_keys=()))
    state.mark_ready(model)
    transport = httpx2.ASGITransport(http_app(state), raise_app_exceptions=False)
    http = httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)
    headers = {"Content-Type": "application/json"}

    async def post(path: str, body: bytes) -> httpx2.Response:
        return await http.post(path, content=body, headers=headers)

    return post


async def answer_request(post: Post, line: bytes) -> Result:
    """Return the line of output for a request. An error of this line is in its result.

    Raises the server's error if it has stopped serving, and `ServerError` if it cannot be reached.
    """
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
        body = msgspec.json.decode(request.body, type=_Body)
    except msgspec.MsgspecError as error:
        return _refused(line, str(error))
    if request.method != "POST" or request.url not in URLS:
        return _refused(line, f"method must be POST, and url one of {', '.join(URLS)}")
    if body.stream:
        return _refused(line, "a batch has no streams: leave `stream` out of the body")
    while True:
        response = await post(request.url, bytes(request.body))
        if response.status_code != 503:
            break
        failure = response_error(503, response.content, response.headers)
        if not isinstance(failure, QueueFullError):
            raise failure
        await anyio.sleep(failure.retry_after)  # the queue is full of other requests
    shown, tokens = _read(response.content)
    answer = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id"),
        "body": shown,
    }
    return Result(_output(request.custom_id, answer, None), failed=response.status_code != 200, tokens=tokens)


def _refused(line: bytes, reason: str) -> Result:
    named = msgspec.json.decode(line, type=_Named).custom_id
    return Result(_output(named, None, {"code": "invalid_request", "message": reason}), failed=True)


def _output(custom_id: Any, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    identity = f"batch_req_{uuid.uuid4().hex}"
    return {"id": identity, "custom_id": custom_id, "response": response, "error": error}


def _read(content: bytes) -> tuple[msgspec.Raw | str, int]:
    """Return the body of an answer on one line, and its number of generated tokens. A body that is not JSON is text."""
    try:
        usage = msgspec.json.decode(content, type=_Answer).usage
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return content.decode(errors="replace"), 0
    line = msgspec.json.format(content, indent=-1) if b"\n" in content else content
    return msgspec.Raw(line), 0 if usage is None else usage.completion_tokens

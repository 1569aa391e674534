"""The connection of a `Client` to its server: sends requests, and returns answers or raises errors."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import httpx2

from aengine.client.wire import DONE, request_json, response_error
from aengine.errors import ConfigError, EngineClosedError, EngineNotReadyError, ServerError
from aengine.requests.sampling_params import SamplingParams

MAX_EVENT_BYTES = 64 * 2**20
CONNECT_SECONDS = 10.0
_ERROR_BYTES = 2**20  # of an error's body; the rest is not read
JSON = {"Content-Type": "application/json"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NO_LIMIT = httpx2.Timeout(None, connect=CONNECT_SECONDS, pool=None)


class Connection:
    """HTTP to one server, within `async with`. Failures are raised as aengine's errors."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float) -> None:
        self.base_url = _checked_url(base_url)
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise ConfigError("api_key must be visible ASCII, without spaces")
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=urlsplit(self.base_url).hostname not in _LOOPBACK,  # a proxy would connect to its own localhost
        )
        self._timeout = timeout
        self._tasks: anyio.abc.TaskGroup | None = None
        self._closed = False
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise EngineClosedError("a Client can be entered only once; create a new one")
        await self._exit.enter_async_context(self._http)
        self._tasks = await self._exit.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        # The tasks have nothing left to raise, so the body's own exception is not wrapped in a group.
        await self._exit.__aexit__(None, None, None)

    async def get(self, path: str) -> dict[str, Any]:
        """GET a path and return the JSON object of the answer. Raises the error that the server answers with."""
        response = await self._send("GET", path)
        try:
            body = checked(response).json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ServerError(f"{self.base_url} does not answer as an aengine server does")
        return body

    async def post(self, path: str, body: bytes) -> httpx2.Response:
        """POST a JSON body and return the answer with any status, however long it takes."""
        return await self._send("POST", path, content=body, headers=JSON, timeout=_NO_LIMIT)

    async def _command(self, path: str, fields: Mapping[str, Any]) -> None:
        """POST fields, however long the answer takes. Raises the error that the server answers with."""
        checked(await self.post(path, request_json(fields)))

    async def _send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        self._task_group()
        try:
            return await self._http.request(method, path, **options)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if self._closed:
                raise EngineClosedError("the client was closed") from error
            raise self._connection_error(error) from error

    @asynccontextmanager
    async def _events(
        self, path: str, body: bytes, params: SamplingParams, headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncGenerator[str, None]]:
        """The data of the events that answer a POST. Raises the error that the server answers with instead."""
        async with self._http.stream("POST", path, content=body, headers={**JSON, **headers}) as response:
            if response.status_code != 200:
                raise response_error(response.status_code, await _error_body(response), response.headers, params)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ServerError(f"{self.base_url} does not answer as an aengine server does", 200)
            yield _event_data(response)

    def _task_group(self) -> anyio.abc.TaskGroup:
        """Return the client's task group. Raises an error before and after `async with`."""
        if self._tasks is None:
            raise EngineNotReadyError("a Client is used within `async with`")
        if self._closed:
            raise EngineClosedError("the client is closed")
        return self._tasks

    def _connection_error(self, error: httpx2.HTTPError | httpx2.StreamError) -> ServerError:
        match error:
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                happened = "cannot be reached"
            case httpx2.ReadTimeout():
                happened = "sent nothing for too long"
            case httpx2.SSEError():
                happened = "sent an event that cannot be read"
            case _:
                happened = "broke the connection off"
        return ServerError(f"the server at {self.base_url} {happened} ({str(error) or type(error).__name__})")


def checked(response: httpx2.Response) -> httpx2.Response:
    """Return the response. Raises its error if its status is not 200."""
    if response.status_code != 200:
        raise response_error(response.status_code, response.content, response.headers)
    return response


async def _event_data(response: httpx2.Response) -> AsyncGenerator[str, None]:
    async for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
        if event.data != DONE:
            yield event.data


async def _error_body(response: httpx2.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _ERROR_BYTES:
            break
    return body


def _checked_url(base_url: str) -> str:
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise ConfigError(f"the server's address must look like http://localhost:8000, got {base_url!r}")
    return base_url.rstrip("/").removesuffix("/v1")

"""`Client`: the API of `Engine`, over HTTP."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import httpx2

from aengine.client.pooling import PooledAnswers
from aengine.client.sleep import Sleeping
from aengine.client.stream import RemoteStream
from aengine.client.wire import DONE, read_chunk, read_event, request_body, response_error
from aengine.engine.requests.arguments import check_routing, dict_list, one_chat, one_prompt, resolved_params
from aengine.engine.requests.consume import collect, drain
from aengine.errors import (
    AengineError,
    ConfigError,
    EngineClosedError,
    EngineNotReadyError,
    InvalidRequestError,
    ServerError,
    renamed_param,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion, Fragment

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_CONNECT_SECONDS = 10.0
_IN_ONE_PIECE = 10  # times the timeout: for answers without signs of life
_ERROR_BYTES = 2**20  # of a refusal's body that are read
MAX_EVENT_BYTES = 64 * 2**20
_ANY_VOCABULARY = 2**62  # the server knows the real bound
_HEADER_TEXT = re.compile(r"[!-~]{1,128}")  # visible ASCII
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Client(PooledAnswers, Sleeping):
    """A model on an aengine server, used as `async with Client("http://host:8000") as client`.

    Methods, arguments, results and errors are `Engine`'s. `timeout` is the longest silence in seconds, of a server
    that sends a sign of life every 15 (its knob `heartbeat`), a whole request may take any time; embeddings and scores,
    which come in one piece, ten times as long. Nothing is retried.
    Leaving ends what still runs with `EngineClosedError`.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 60.0) -> None:
        self.base_url = _checked_url(base_url)
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise ConfigError("api_key must be visible ASCII, without spaces")
        self._http = httpx2.AsyncClient(
            base_url=self.base_url,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=32),
            trust_env=urlsplit(self.base_url).hostname not in _LOOPBACK,  # a proxy would look for its own localhost
        )
        # Embeddings and scores come in one piece, without a sign of life before it.
        self._patience = httpx2.Timeout(timeout * _IN_ONE_PIECE, connect=_CONNECT_SECONDS, pool=None)
        self._running: dict[str, RemoteStream] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self._closed = False
        self._exit = AsyncExitStack()

    # ---- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise EngineClosedError("a Client can be entered once; make a new one")
        await self._exit.enter_async_context(self._http)
        self._tasks = await self._exit.enter_async_context(anyio.create_task_group())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for stream in list(self._running.values()):
            stream.fail(EngineClosedError("the client was closed"))
        # Nothing of the readers is left to raise, so the body's own exception passes as it is instead of in a group.
        await self._exit.__aexit__(None, None, None)

    async def served_model(self) -> str:
        """The name of the model that the server serves. Raises `EngineNotReadyError` while it loads."""
        data = (await self.get("/v1/models")).get("data")
        try:
            return str(data[0]["id"])  # type: ignore[index]  # whatever it is, the next line answers
        except (TypeError, LookupError):
            raise ServerError("the server does not say which model it serves") from None

    async def get(self, path: str) -> dict[str, Any]:
        """GET a path: the JSON object of the answer. Raises what it answers instead."""
        self._task_group()
        try:
            response = await self._http.get(path)
            if response.status_code != 200:
                raise response_error(response.status_code, response.content, response.headers)
            body = response.json()
        except httpx2.HTTPError as error:
            raise self._connection_error(error) from error
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ServerError(f"{self.base_url} does not answer as an aengine server does")
        return body

    async def post(self, path: str, body: bytes) -> httpx2.Response:
        """POST a JSON body as it is, and return the answer whatever its status, however long it takes."""
        self._task_group()
        try:
            timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
            headers = {"Content-Type": "application/json"}
            return await self._http.post(path, content=body, headers=headers, timeout=timeout)
        except httpx2.HTTPError as error:
            raise self._connection_error(error) from error

    # ---- adapters -----------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Let the server load an adapter: a folder below its `lora_folders`, or a Hugging Face id where it takes any.

        Errors are those of `Engine.load_adapter`; and `ServerError` where the server allows no loading.
        """
        await self._operate("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": replace})

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name an adapter, and wait until those who have it are done.

        Errors are those of `Engine.unload_adapter`; and `ServerError` where the server allows it to nobody.
        """
        await self._operate("/v1/unload_lora_adapter", {"lora_name": name})

    async def _operate(self, path: str, fields: Mapping[str, Any]) -> None:
        """POST fields, however long the answer takes. Raises what it says instead of a success."""
        self._task_group()
        try:
            timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
            response = await self._http.post(path, json=fields, timeout=timeout)
        except httpx2.HTTPError as error:
            raise self._connection_error(error) from error
        if response.status_code != 200:
            with renamed_param({"lora_name": "name", "lora_path": "path"}):
                raise response_error(response.status_code, response.content, response.headers)

    # ---- requests -----------------------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the continuation of a prompt: text as the tokenizer reads it, or token ids.

        `options` are those of `submit`. Closing the generator (break, cancellation, timeout) ends the request on the
        server.
        """
        return drain(lambda: self.submit(prompt, params, **options))

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `generate`, collected into one `Completion`."""
        return await collect(await self.submit(prompt, params, **options))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the assistant's next message in a chat. `options` are those of `submit_chat`."""
        return drain(lambda: self.submit_chat(messages, params, **options))

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `chat_stream`, collected into one `Completion`."""
        return await collect(await self.submit_chat(messages, params, **options))

    async def chat_chunks(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The assistant's next message as chunks of OpenAI's API: thoughts and calls of tools are told apart from
        content.

        Close it (`contextlib.aclosing`) when you stop early.
        """
        fields = _chat_fields(messages, tools, template_kwargs) | {"stream_options": {"include_usage": True}}
        names, resolved = _resolved(params, sampling)
        if resolved.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": resolved.logprobs}
        body = request_body(fields, resolved, [name for name in names if name != "logprobs"], {"model": adapter})
        self._task_group()
        try:
            async with self._event_response("/v1/chat/completions", body, resolved, {}) as response:
                async for data in _events(response):
                    yield read_chunk(data, resolved)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise self._connection_error(error) from error

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> RemoteStream:
        """Send a request. The consumer of the stream must `abort()` it when it stops early.

        Returns when the server begins to answer: with the first token, or with a sign of life before it. Arguments
        and errors are those of `Engine.submit`; and `ServerError`, where the server cannot be reached or answers
        as no engine would.
        """
        fields = {"prompt": prompt} if isinstance(prompt, str) else {"input_ids": one_prompt(prompt)}
        return await self._submit(fields, params, sampling, request_id, priority, cache_salt, adapter)

    async def submit_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        **sampling: Any,
    ) -> RemoteStream:
        """`submit` for a chat: `tools` and `template_kwargs` go to the chat template.

        With `continue_final_message` the answer goes on with the last message, which is the beginning of it.
        """
        fields = _chat_fields(messages, tools, template_kwargs)
        if continue_final_message:
            fields["continue_final_message"] = True
        return await self._submit(fields, params, sampling, request_id, priority, cache_salt, adapter)

    async def _submit(
        self,
        fields: Mapping[str, Any],
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        adapter: str | None,
    ) -> RemoteStream:
        tasks = self._task_group()
        names, resolved = _resolved(params, sampling)
        check_routing(priority, cache_salt, adapter)
        routing = {"priority": priority, "cache_salt": cache_salt, "fill_context": True, "model": adapter}
        body = request_body(fields, resolved, names, routing)
        stream = self._new_stream(request_id)
        tasks.start_soon(self._read, stream, body, resolved)
        try:
            await stream.admitted()
        except BaseException:
            stream.abort()
            raise
        return stream

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        self._task_group()
        headers = {"Content-Type": "application/json", **headers}
        try:
            response = await self._http.post(path, content=body, headers=headers, timeout=self._patience)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            if self._closed:
                raise EngineClosedError("the client was closed") from error
            raise self._connection_error(error) from error
        if response.status_code != 200:
            raise response_error(response.status_code, response.content, response.headers)
        return response.content

    def _task_group(self) -> anyio.abc.TaskGroup:
        if self._tasks is None:
            raise EngineNotReadyError("a Client is used within `async with`")
        if self._closed:
            raise EngineClosedError("the client is closed")
        return self._tasks

    def _new_stream(self, request_id: str | None) -> RemoteStream:
        request_id = request_id or secrets.token_hex(12)
        if not isinstance(request_id, str) or not _HEADER_TEXT.fullmatch(request_id):
            raise InvalidRequestError("request_id must be 1 to 128 visible ASCII characters", "request_id")
        if request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id!r} is already running", "request_id")
        stream = self._running[request_id] = RemoteStream(request_id)
        return stream

    # ---- the task of one request --------------------------------------------------------------------------

    async def _read(self, stream: RemoteStream, body: bytes, params: SamplingParams) -> None:
        """The task that reads one response into its stream; whatever happens here is handed to the consumer, nothing
        escapes into the task group.
        """
        try:
            with stream.connection:
                await self._read_events(stream, body, params)
                stream.fail(ServerError("the connection ended before the answer did"))  # unless the answer has ended
        except AengineError as error:
            stream.fail(error)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            stream.fail(self._connection_error(error))
        except Exception as error:  # noqa: BLE001 - the consumer would wait for ever
            stream.fail(ServerError(f"the answer could not be read: {type(error).__name__}: {error}"))
        finally:
            del self._running[stream.id]
            stream.fail(EngineClosedError("the request was cancelled"))

    async def _read_events(self, stream: RemoteStream, body: bytes, params: SamplingParams) -> None:
        async with self._event_response("/generate", body, params, {"X-Request-Id": stream.id}) as response:
            stream.answered.set()
            async for data in _events(response):
                await stream.put(read_event(data, params))

    @asynccontextmanager
    async def _event_response(
        self, path: str, body: bytes, params: SamplingParams, headers: Mapping[str, str]
    ) -> AsyncIterator[httpx2.Response]:
        """The response to a POST, a stream of events. Raises what the server says instead."""
        headers = {"Content-Type": "application/json", **headers}
        async with self._http.stream("POST", path, content=body, headers=headers) as response:
            if response.status_code != 200:
                raise response_error(response.status_code, await _error_body(response), response.headers, params)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                raise ServerError(f"{self.base_url} does not answer as an aengine server does", 200)
            yield response

    def _connection_error(self, error: httpx2.HTTPError | httpx2.StreamError) -> ServerError:
        match error:
            case httpx2.ConnectError() | httpx2.ConnectTimeout():
                happened = "cannot be reached"
            case httpx2.ReadTimeout():
                happened = "has fallen silent"
            case httpx2.SSEError():
                happened = "sent an event that cannot be read"
            case _:
                happened = "broke the connection off"
        return ServerError(f"the server at {self.base_url} {happened} ({str(error) or type(error).__name__})")


def _resolved(params: SamplingParams | None, sampling: Mapping[str, Any]) -> tuple[tuple[str, ...], SamplingParams]:
    """The names of the parameters to send, and the parameters, checked as far as that is possible here."""
    names = SamplingParams.__struct_fields__ if params is not None else tuple(sampling)
    return names, resolved_params(SamplingParams(), params, sampling, _ANY_VOCABULARY)


def _chat_fields(messages: object, tools: object, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"messages": one_chat(messages)}
    if tools is not None:
        fields["tools"] = dict_list(tools, "tools")
    if template_kwargs is not None:
        fields["chat_template_kwargs"] = dict(template_kwargs)
    return fields


async def _events(response: httpx2.Response) -> AsyncIterator[str]:
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

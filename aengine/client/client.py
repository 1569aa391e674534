"""`Client`: the API of `Engine`, over HTTP."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

from aengine.client.images import encode_images, parts_as_given
from aengine.client.pooling import PooledAnswers
from aengine.client.stream import RemoteStream
from aengine.client.wire import check_request_id, read_chunk, read_event, request_body
from aengine.engine.requests.arguments import check_routing, dict_list, one_chat, one_prompt, resolved_params
from aengine.engine.requests.stream import collect, drain
from aengine.errors import (
    AengineError,
    EngineClosedError,
    InvalidRequestError,
    ServerError,
    renamed_param,
)
from aengine.requests.sampling_params import SamplingParams
from aengine.types import Completion, Fragment, SleepMode

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

_ANY_VOCABULARY = 2**62  # the server knows the real bound
_ADAPTER_FIELDS = {"lora_name": "name", "lora_path": "path"}  # the server's name -> the argument's name


class Client(PooledAnswers):
    """A model on an aengine server, used as `async with Client("http://host:8000") as client`.

    Methods, arguments, results and errors are those of `Engine`. `timeout` is the longest silence in seconds: the
    server sends a sign of life every 15 seconds (its knob `heartbeat`), and a whole request may take any time.
    Embeddings and scores come in one piece and may take ten times as long. Nothing is retried. Leaving the context ends
    running requests with `EngineClosedError`.
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, timeout: float = 60.0) -> None:
        super().__init__(base_url, api_key, timeout)
        self._running: dict[str, RemoteStream] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        for stream in list(self._running.values()):
            stream.fail(EngineClosedError("the client was closed"))
        await super().__aexit__(kind, error, trace)

    # ---- the server ---------------------------------------------------------------------------------------

    async def served_model(self) -> str:
        """Return the name of the model that the server serves. Raises `EngineNotReadyError` while it loads."""
        data = (await self.get("/v1/models")).get("data")
        try:
            return str(data[0]["id"])  # type: ignore[index]  # other types raise an error that is caught below
        except (TypeError, LookupError):
            raise ServerError("the server does not say which model it serves") from None

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Move the engine's weights to host memory and free its device's memory.

        Raises the errors of `Engine.sleep`, and `ServerError` if the server's knobs forbid it.
        """
        await self._command(f"/sleep?level={int(level)}&mode={mode}", {})

    async def wake_up(self) -> None:
        """Move the weights back to the device, so that the engine serves again. Raises the errors of `sleep`."""
        await self._command("/wake_up", {})

    async def reload(self, folder: str | Path | None = None) -> None:
        """Read the weights of a folder below the server's `reload_folders`; None: the model's own folder.

        Raises the errors of `Engine.reload`, and `ServerError` if the server's knobs forbid it.
        """
        await self._command("/reload", {} if folder is None else {"folder": str(folder)})

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        sleeping = (await self.get("/is_sleeping")).get("is_sleeping")
        if not isinstance(sleeping, bool):
            raise ServerError("the server does not say whether its engine sleeps")
        return sleeping

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter on the server: a folder below its `lora_folders`, or a Hugging Face id if it takes any.

        Raises the errors of `Engine.load_adapter`, and `ServerError` if the server's knobs forbid it.
        """
        with renamed_param(_ADAPTER_FIELDS):
            await self._command(
                "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, "load_inplace": replace}
            )

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and wait until its running requests have ended.

        Raises the errors of `Engine.unload_adapter`, and `ServerError` if the server's knobs forbid it.
        """
        with renamed_param(_ADAPTER_FIELDS):
            await self._command("/v1/unload_lora_adapter", {"lora_name": name})

    # ---- requests -----------------------------------------------------------------------------------------

    async def requests_closed(self) -> None:
        """Wait until no request is open. An aborted request is open until its connection is closed.

        Await it before you block the event loop, so that the server learns of aborted requests.
        """
        while self._running:
            await next(iter(self._running.values())).closed.wait()

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the continuation of a prompt, which is text or token ids.

        `options` are the arguments of `submit`. Closing the generator (break, cancellation, timeout) ends the request
        on the server.
        """
        return drain(lambda: self.submit(prompt, params, **options))

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `generate`, collected into one `Completion`."""
        return await collect(await self.submit(prompt, params, **options))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the assistant's next message in a chat. `options` are the arguments of `submit_chat`."""
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
        """Stream the assistant's next message as chunks of OpenAI's API.

        The chunks hold thoughts and tool calls separately from the content. Close the generator (`contextlib.aclosing`)
        if you stop early.
        """
        fields = await _chat_fields(messages, tools, template_kwargs)
        fields["stream_options"] = {"include_usage": True}
        names, resolved = _resolved(params, sampling)
        if resolved.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": resolved.logprobs}
        body = request_body(fields, resolved, [name for name in names if name != "logprobs"], {"model": adapter})
        self._task_group()
        try:
            async with self._events("/v1/chat/completions", body, resolved, {}) as events:
                async for data in events:
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
        """Send a request. The consumer must `abort()` the stream if it stops early.

        Returns when the server begins to answer, with the first token or a sign of life. Arguments and errors are those
        of `Engine.submit`. Raises `ServerError` if the server cannot be reached, or answers in an unknown way.
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
        """Like `submit`, for a chat. `tools` and `template_kwargs` go to the chat template.

        continue_final_message: the last message is the beginning of the answer, which continues it.
        """
        fields = await _chat_fields(messages, tools, template_kwargs)
        if continue_final_message:
            fields["continue_final_message"] = True
        with parts_as_given():
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

    def _new_stream(self, request_id: str | None) -> RemoteStream:
        request_id = request_id or secrets.token_hex(12)
        check_request_id(request_id)
        if request_id in self._running:
            raise InvalidRequestError(f"a request with the id {request_id!r} is already running", "request_id")
        stream = self._running[request_id] = RemoteStream(request_id)
        return stream

    # ---- the task of one request --------------------------------------------------------------------------

    async def _read(self, stream: RemoteStream, body: bytes, params: SamplingParams) -> None:
        """Read one response into its stream, as a task. Errors go to the consumer; none is raised here."""
        try:
            with stream.connection:
                await self._read_events(stream, body, params)
                stream.fail(ServerError("the connection ended before the answer did"))  # unless it has ended
        except AengineError as error:
            stream.fail(error)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            stream.fail(self._connection_error(error))
        except Exception as error:  # noqa: BLE001 - the consumer would wait forever
            stream.fail(ServerError(f"the answer could not be read: {type(error).__name__}: {error}"))
        finally:
            del self._running[stream.id]
            stream.closed.set()
            stream.fail(EngineClosedError("the request was cancelled"))

    async def _read_events(self, stream: RemoteStream, body: bytes, params: SamplingParams) -> None:
        async with self._events("/generate", body, params, {"X-Request-Id": stream.id}) as events:
            stream.answered.set()
            async for data in events:
                await stream.put(read_event(data, params))


def _resolved(params: SamplingParams | None, sampling: Mapping[str, Any]) -> tuple[tuple[str, ...], SamplingParams]:
    """Return the names of the parameters to send, and the parameters, checked as far as possible without the model."""
    names = SamplingParams.__struct_fields__ if params is not None else tuple(sampling)
    return names, resolved_params(SamplingParams(), params, sampling, _ANY_VOCABULARY)


async def _chat_fields(messages: object, tools: object, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    chat = one_chat(messages)
    await encode_images(chat)
    fields: dict[str, Any] = {"messages": chat}
    if tools is not None:
        fields["tools"] = dict_list(tools, "tools")
    if template_kwargs is not None:
        fields["chat_template_kwargs"] = dict(template_kwargs)
    return fields

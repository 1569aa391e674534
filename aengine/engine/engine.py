"""`Engine`, the public async API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

import anyio
import anyio.abc

from aengine.config import EngineConfig
from aengine.config.configure import configure
from aengine.engine.addons.adapters import Adapters
from aengine.engine.addons.kv_events import Publisher, published_events
from aengine.engine.facts import NOT_ENTERED, EngineFacts
from aengine.engine.generation import Messages, Prompt
from aengine.engine.loaded import Loaded, load
from aengine.engine.requests.arguments import Routing
from aengine.engine.requests.stream import Stream, collect, drain
from aengine.engine.service import Service
from aengine.engine.sleep import run_to_end
from aengine.errors import ConfigError, EngineClosedError
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import ChatPrompt
from aengine.text.answer.reader import ReadStream
from aengine.text.template.messages import TemplateOptions
from aengine.types import (
    Classes,
    Completion,
    Embeddings,
    Fragment,
    Ranking,
    Scores,
    SleepMode,
)

if TYPE_CHECKING:  # torch, which `load` imports
    from aengine.runtime.startup.start import Start


class Engine(EngineFacts):
    """An LLM on one device or several, used as `async with Engine(...) as engine`.

    Knobs are the fields of `EngineConfig`. Pass them as keywords, or all of them as `config=`. Environment variables
    `AENGINE_*` set the knobs that are not passed. `start` makes the runtime. None means `start_runtime`; tests and
    benchmarks pass other functions.

    Entering the `async with` block loads the model. Leaving it ends all running requests with `EngineClosedError`.

    Properties and methods that need the model raise `EngineNotReadyError` until it is loaded.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        start: Start | None = None,
        **knobs: Any,
    ) -> None:
        if config is not None and (knobs or model is not None):
            raise ConfigError("give either config= or single knobs, not both")
        if model is not None:
            knobs["model"] = str(model)
        super().__init__(config if config is not None else configure(EngineConfig, **knobs))
        self._start = start
        self._exit = AsyncExitStack()

    # ---- life ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._entered_loop is not None:
            raise EngineClosedError("an Engine can be entered once; make a new one")
        self._entered_loop = asyncio.get_running_loop()
        publisher = None if self.config.kv_events is None else Publisher(self.config)
        loading: list[Loaded] = []
        try:
            await run_to_end(lambda: loading.append(load(self.config, self.latencies, self._start)))
        except BaseException:
            if publisher is not None:
                publisher.close()
            with anyio.CancelScope(shield=True):
                for loaded in loading:  # cancelled, but the model was loaded to the end
                    await loaded.close()
            raise
        [loaded] = loading
        self.timeline = loaded.timeline
        self._service = service = Service(self.config, loaded, self.failed)
        service.start(await self._exit.enter_async_context(anyio.create_task_group()))
        try:
            events = published_events(self.config, loaded.scheduler.memory.tree, publisher)
            await self._exit.enter_async_context(events)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        self.created = int(time.time())
        return self

    def __enter__(self) -> NoReturn:
        raise TypeError(NOT_ENTERED)

    def __exit__(self, *_: object) -> None: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        if self._service is not None:
            await self._service.stop()
        # The task group is empty, so it does not wrap an exception of the `async with` body in a group.
        await self._exit.__aexit__(None, None, None)

    # ---- requests that generate ---------------------------------------------------------------------------

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the continuation of a prompt, which is text or token ids.

        `options` are those of `submit`. Closing the generator (break, cancellation, timeout) aborts the request.
        """
        return drain(lambda: self.submit(prompt, params, **options))

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `generate`, collected into one `Completion`."""
        return await collect(await self.submit(prompt, params, **options))

    def chat_stream(
        self, messages: Messages, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Fragment, None]:
        """Stream the assistant's next message in a chat, rendered with the checkpoint's chat template.

        `options` are those of `submit_chat`.
        """
        return drain(lambda: self.submit_chat(messages, params, **options))

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **options: Any) -> Completion:
        """Like `chat_stream`, collected into one `Completion`."""
        return await collect(await self.submit_chat(messages, params, **options))

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        clip: bool = False,
        images: PromptImages | None = None,
        **sampling: Any,
    ) -> Stream:
        """Validate, tokenize and enqueue a prompt. A consumer that stops early must `abort()` the stream.

        Args:
            params: replaces the checkpoint's default `SamplingParams`.
            priority: requests with a lower number run first.
            cache_salt: requests with different salts share no cached prefix.
            adapter: the name of a loaded adapter.
            clip: reduce max_tokens if prompt and output do not fit the context. Otherwise such a request is refused.
            images: the images among the token ids, as `encode_chat` returns them.
            sampling: overrides single fields of the default parameters.

        Raises `InvalidRequestError`, `ContextLengthError`, `QueueFullError`, `ModelNotFoundError`;
        `EngineNotReadyError`, `EngineClosedError` or `EngineFailedError` if the engine does not serve.
        """
        routing = Routing(request_id, priority, cache_salt, adapter)
        return await self._serving().generation.submit(prompt, params, sampling, routing, clip, images)

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
    ) -> ReadStream:
        """Like `submit` for a chat; `tools` and `template_kwargs` go to the chat template.

        Thoughts and tool calls are separated from the text, as `reasoning` and `tool_calls`.
        Contents may have parts `{"type": "image", "image": ...}` with bytes, a path or an image of Pillow, unless
        `no_images` says why not.
        With `continue_final_message` the answer continues the last message.
        """
        return await self._serving().generation.submit_chat(
            messages,
            params,
            sampling,
            Routing(request_id, priority, cache_salt, adapter),
            tools=tools,
            template_kwargs=template_kwargs,
            continue_final_message=continue_final_message,
        )

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt:
        """Return the prompt of a chat, rendered with the checkpoint's chat template and tokenized.

        `options` are those of `TemplateOptions`. They choose whether the prompt ends with the opening of the
        assistant's next message, without it, or with the last message's content.

        Raises `InvalidRequestError` if the messages do not suit the template, or have `context` tokens or more.
        """
        return await self._serving().generation.encode_chat(messages, tools=tools, context=context, **options)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its memory; its stream ends with `finish_reason="abort"`.

        Returns False if no such request is running.
        """
        return self._service is not None and self._service.requests.abort_id(request_id)

    # ---- requests that pool -------------------------------------------------------------------------------
    #
    # `routing` are request_id, priority, cache_salt and adapter, as in `submit`. Cancelling a call frees its memory.
    # All raise what `submit` raises, and `InvalidRequestError` if the model cannot give such answers.

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        **routing: Any,
    ) -> Embeddings:
        """Return an embedding vector for each prompt. A prompt is text or token ids.

        The vector is the hidden state of the last token, or the mean over all tokens, as the checkpoint says.

        Args:
            dimensions: keep only this number of dimensions, if the checkpoint allows it.
            normalize: scale to length 1. None: as the checkpoint says.
        """
        return await self._serving().pooling.embed(prompts, dimensions, normalize, routing)

    async def classify(self, prompts: Prompt | Sequence[Prompt], **routing: Any) -> Classes:
        """Return the probability of each class for each prompt. The model must have a classification head."""
        return await self._serving().pooling.classify(prompts, routing)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        **routing: Any,
    ) -> Scores:
        """Return how relevant documents are to queries: one query and any number of documents, or pairs of both.

        The score is a probability if the model is a reranker. For any other model it is the cosine of the embeddings.

        instruction: tells a reranker which documents are relevant. Only rerankers that read instructions accept it.
        """
        return await self._serving().pooling.score(queries, documents, instruction, routing)

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        **routing: Any,
    ) -> Ranking:
        """Return the documents in the order of their `score` with the query, the best first.

        top_n: how many documents to return. None means all.
        """
        return await self._serving().pooling.rerank(query, documents, top_n, instruction, routing)

    # ---- adapters -----------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter while requests run. Afterwards requests may name it.

        Args:
            path: a PEFT folder or a Hugging Face id.
            replace: whether an adapter of the same name is replaced. Its running requests keep the old adapter.

        If loading fails, nothing changes. Raises `InvalidRequestError`, `AdapterError`, `HubError`, and `ConfigError`
        if there is no memory for adapters.
        """
        await self._adapters().load(name, str(path), replace)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter, and wait until its requests are done. Raises `ModelNotFoundError`."""
        await self._adapters().unload(name)

    def _adapters(self) -> Adapters:
        adapters = self._serving().loaded.adapters
        if adapters is None:
            raise ConfigError("lora_loading: the device has no room for adapters; start with lora_loading=True")
        return adapters

    # ---- sleep and new weights ----------------------------------------------------------------------------

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Move the weights to host memory, drop keys and values, and free the device's memory.

        New requests are refused from now on. Running requests end first, or at once with `mode="abort"`. Adapters
        stay loaded. A call that is cancelled while requests still run changes nothing. Does nothing if the engine
        already sleeps.

        level: 1, as in vLLM. vLLM's level 2, which discards the weights, is refused. Raises `InvalidRequestError`, and
        `ConfigError` without the knob sleep_mode.
        """
        await self._serving().changes.sleep(level, mode)

    async def wake_up(self) -> None:
        """Copy the weights back to the device, and serve requests again with an empty prefix cache.

        Raises `EngineNotReadyError` if other processes use the device's memory. The engine then stays asleep.
        """
        await self._serving().changes.wake_up()

    async def reload(self, folder: str | Path | None = None) -> None:
        """Replace the loaded weights by those in a checkpoint's folder. None means the folder of `config.model`.

        Running requests end with the old weights. New requests wait for the new weights. Cached prefixes are dropped.
        Adapters, the tokenizer, the chat template and the sampling defaults stay.

        Raises `WeightsError` or another `AengineError` if the checkpoint does not fit, and `EngineNotReadyError` if the
        engine sleeps. Then nothing has changed. If reading fails half way, requests are refused until a call succeeds.
        """
        await self._serving().changes.reload(folder)

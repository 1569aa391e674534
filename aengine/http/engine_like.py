"""Protocols of the engine, its streams and its tokenizer, with the members that this layer uses.

`aengine.Engine` implements them, and so does the fake engine of the tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Unpack

from aengine.latency import Latencies
from aengine.prompt_images import PromptImages
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat, ChatPrompt
from aengine.text.answer.reader import StreamLike as StreamLike
from aengine.text.template.messages import TemplateOptions
from aengine.text.tokens.settings import TokenizerInfo
from aengine.timeline import Timeline
from aengine.types import AdapterInfo, Classes, DeviceMemory, Embeddings, Ranking, Scores, SleepMode, Stats


class TokenizerLike(Protocol):
    """Converts text to ids and back."""

    async def encode(
        self, text: str, add_special_tokens: bool = True, context: int | None = None, left: int = 1
    ) -> list[int]:
        """Tokenize a text. Raises `ContextLengthError` if fewer than `left` of `context` tokens remain.

        Texts that are plainly too long are refused without tokenizing them.
        """
        ...

    @property
    def info(self) -> TokenizerInfo:
        """The tokenizer's settings in the checkpoint's files."""
        ...

    @property
    def vocab_size(self) -> int:
        """A bound on the tokenizer's ids, which may be more than the model's."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which are left out of outputs."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text. They may be part of a character."""
        ...

    def token_text(self, token_id: int) -> str:
        """Return the text that the token adds."""
        ...


class EngineLike(Protocol):
    """A loaded engine."""

    @property
    def model_name(self) -> str: ...

    @property
    def model_names(self) -> tuple[str, ...]: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int:
        """All token ids are smaller."""
        ...

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def latencies(self) -> Latencies: ...

    @property
    def created(self) -> int:
        """Unix time at which the engine became ready."""
        ...

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's recommended sampling parameters, which a request's own values override."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error that stopped the whole engine, if there is one."""
        ...

    @property
    def failed(self) -> asyncio.Event:
        """Set when `failure` is set."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """The timeline that records the run, if there is one."""
        ...

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        clip: bool = False,
        images: PromptImages | None = None,
    ) -> StreamLike:
        """Validate and enqueue. Raises `InvalidRequestError`, `ContextLengthError` or `QueueFullError` at once.

        clip: reduce max_tokens to the space that the prompt leaves in the context, instead of refusing it.
        images: the images among the token ids, as `encode_chat` returns them.
        """
        ...

    async def embed(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Embeddings:
        """Return a vector for each prompt."""
        ...

    async def classify(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Classes:
        """Return the class of each prompt."""
        ...

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Scores:
        """Return a relevance score for each pair of query and document."""
        ...

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Ranking:
        """Return the documents ordered by relevance."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request. Returns False if it is not running."""
        ...

    @property
    def no_images(self) -> str:
        """Why chats may not contain images. Empty if they may."""
        ...

    @property
    def images_in_results(self) -> bool:
        """Whether results of tools may have images as well."""
        ...

    @property
    def answer_format(self) -> AnswerFormat:
        """The model's format of thoughts and tool calls."""
        ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt:
        """Render and tokenize a chat. Parts `{"type": "image", "image": bytes}` are images.

        Raises `InvalidRequestError` if the chat template refuses it, and `ContextLengthError` for `context` tokens or
        more.
        """
        ...

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        ...

    def has_adapter(self, name: str) -> bool: ...

    @property
    def lora_loading(self) -> bool:
        """Whether clients may load and unload adapters."""
        ...

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load an adapter. Raises `InvalidRequestError` about `name` or `path`, and `AdapterError`."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests for the adapter, and wait for running ones. Raises `ModelNotFoundError`."""
        ...

    @property
    def refusal(self) -> str:
        """The reason why requests are refused; empty if they are served."""
        ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def sleep_mode(self) -> bool:
        """Whether the engine can sleep."""
        ...

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Free the device's memory. Raises `InvalidRequestError` about `level` or `mode`."""
        ...

    async def wake_up(self) -> None:
        """Allocate the device's memory again."""
        ...

    async def reload(self, folder: str | None = None) -> None:
        """Replace the loaded weights by those in a folder. Raises `CheckpointError`."""
        ...

    def stats(self) -> Stats: ...

    def devices(self) -> list[DeviceMemory]:
        """Return the memory of the model's GPUs."""
        ...

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        ...

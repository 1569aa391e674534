"""Protocols of the engine, its streams and its tokenizer, as far as this layer uses them: `aengine.Engine` has them,
and so has the tests' stand-in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Unpack

from aengine.latency import Latencies
from aengine.requests.sampling_params import SamplingParams
from aengine.text.answer.parser import AnswerFormat, ChatPrompt
from aengine.text.template.messages import TemplateOptions
from aengine.text.tokens.settings import TokenizerInfo
from aengine.timeline import Timeline
from aengine.types import AdapterInfo, Classes, DeviceMemory, Embeddings, Fragment, Ranking, Scores, SleepMode, Stats


class StreamLike(Protocol):
    """The stream of one admitted request. Whoever holds it must call `abort` in the end, however it ends."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def backlog(self) -> int:
        """The number of fragments waiting to be taken."""
        ...

    async def take(self) -> list[Fragment]:
        """Everything waiting, at least one fragment; `[]` after the last. Raises what befell the request."""
        ...

    def abort(self) -> None:
        """Give the request's memory back. Idempotent; without effect on a finished request."""
        ...


class TokenizerLike(Protocol):
    """From text to ids and back."""

    async def encode(
        self, text: str, add_special_tokens: bool = True, context: int | None = None, left: int = 1
    ) -> list[int]:
        """Tokenize a text. Raises `ContextLengthError` where of `context` tokens fewer than `left` are left, as far as
        possible without tokenizing them.
        """
        ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> list[int]: ...

    @property
    def info(self) -> TokenizerInfo:
        """What the checkpoint's files say of it."""
        ...

    @property
    def vocab_size(self) -> int:
        """A bound on the tokenizer's ids, which may be more than the model's."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which outputs leave out."""
        ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, which need not be whole characters."""
        ...

    def token_text(self, token_id: int) -> str:
        """What the token adds to a text."""
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
        """Token ids are below it."""
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
        """The checkpoint's recommended sampling parameters; a request's own values win."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """The error for which the engine as a whole serves no more, if there is one."""
        ...

    @property
    def failed(self) -> asyncio.Event:
        """Set once `failure` is."""
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
    ) -> StreamLike:
        """Validate and enqueue. Raises `InvalidRequestError`, `QueueFullError` and their like at once.

        clip: cut max_tokens to what the prompt leaves of the context, instead of refusing it.
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
        """A vector of each prompt."""
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
        """The class of each prompt."""
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
        """How well documents suit queries, pair by pair."""
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
        """The documents, the best first."""
        ...

    def abort(self, request_id: str) -> bool:
        """End a request; False if no such one is running."""
        ...

    @property
    def answer_format(self) -> AnswerFormat:
        """How the model writes thoughts and calls of tools."""
        ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        context: int | None = None,
        **options: Unpack[TemplateOptions],
    ) -> ChatPrompt:
        """Render and tokenize a chat. Raises `InvalidRequestError` where it does not suit the chat template.

        `ContextLengthError` for `context` tokens or more.
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
        """Let requests name an adapter. Raises `InvalidRequestError` about `name` or `path`, `AdapterError`."""
        ...

    async def unload_adapter(self, name: str) -> None:
        """Let no new request name it, and wait for those that do. Raises `ModelNotFoundError`."""
        ...

    @property
    def refusal(self) -> str:
        """Why no request is taken up; empty: they are."""
        ...

    @property
    def is_sleeping(self) -> bool: ...

    @property
    def sleep_mode(self) -> bool:
        """Whether the engine can sleep."""
        ...

    async def sleep(self, level: int = 1, *, mode: SleepMode = "wait") -> None:
        """Give the device's memory back. Raises `InvalidRequestError` about `level` or `mode`."""
        ...

    async def wake_up(self) -> None:
        """Take it again."""
        ...

    async def reload(self, folder: str | None = None) -> None:
        """Read the weights in a folder over those that are loaded. Raises `CheckpointError`."""
        ...

    def stats(self) -> Stats: ...

    def devices(self) -> list[DeviceMemory]:
        """The GPUs that the model lies on."""
        ...

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        ...

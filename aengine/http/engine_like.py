"""What this layer needs of an engine, and nothing more: `aengine.Engine` has it, and so has the tests' stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aengine.latency import Latencies
from aengine.text.answer.parser import AnswerFormat, ChatPrompt
from aengine.text.tokens.info import TokenizerInfo
from aengine.timeline import Timeline
from aengine.types import Fragment, SamplingParams, Stats


class StreamLike(Protocol):
    """One admitted request. Whoever holds it must call `abort` in the end, however it ends."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def backlog(self) -> int:
        """Fragments waiting to be taken."""
        ...

    async def take(self) -> list[Fragment]:
        """Everything waiting, at least one fragment; `[]` after the last. Raises what befell the request."""
        ...

    def abort(self) -> None:
        """Give the request's memory back. Idempotent; without effect on a finished request."""
        ...


class TokenizerLike(Protocol):
    """From text to ids and back."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]: ...

    @property
    def info(self) -> TokenizerInfo:
        """What the checkpoint's files say of it."""
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
        """What the checkpoint recommends; a request's own values win."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why the engine as a whole can serve no more, if so."""
        ...

    @property
    def failed(self) -> asyncio.Event:
        """Set when that happens."""
        ...

    @property
    def timeline(self) -> Timeline | None:
        """What records the run, if anything does."""
        ...

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> StreamLike:
        """Validate and enqueue. Raises `InvalidRequestError`, `QueueFullError` and their like at once."""
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
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> ChatPrompt:
        """The chat as the model reads it. Raises `InvalidRequestError` where it does not suit the chat template."""
        ...

    def stats(self) -> Stats: ...

    def flush_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        ...

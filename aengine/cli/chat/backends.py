"""Backends of the chat shell, an engine in this process or a server; both separate thoughts from content."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aengine.errors import ServerError
from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from aengine.types import Usage

if TYPE_CHECKING:
    from aengine.client import Client
    from aengine.engine import Engine

Messages = list[dict[str, Any]]


class AnswerEnd(msgspec.Struct):
    """Usage and finish reason, after the last piece of an answer."""

    usage: Usage
    finish_reason: str | None


ChatEvent = ReasoningDelta | ContentDelta | AnswerEnd


class ChatBackend(Protocol):
    def answer(
        self, messages: Messages, sampling: dict[str, Any], template_kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatEvent, None]:
        """The next message, piece by piece, and its ending. Closing it ends the request."""
        ...


class EngineBackend:
    def __init__(self, engine: Engine, adapter: str | None = None) -> None:
        self._engine = engine
        self._adapter = adapter

    async def answer(
        self, messages: Messages, sampling: dict[str, Any], template_kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatEvent, None]:
        chat = self._engine.chat_stream(messages, template_kwargs=template_kwargs, adapter=self._adapter, **sampling)
        async with aclosing(chat) as fragments:
            async for fragment in fragments:
                if fragment.reasoning:
                    yield ReasoningDelta(fragment.reasoning)
                if fragment.text:
                    yield ContentDelta(fragment.text)
                if fragment.usage is not None:
                    yield AnswerEnd(fragment.usage, fragment.finish_reason)


class ServerBackend:
    def __init__(self, client: Client, adapter: str | None = None) -> None:
        self._client = client
        self._adapter = adapter

    async def answer(
        self, messages: Messages, sampling: dict[str, Any], template_kwargs: dict[str, Any]
    ) -> AsyncGenerator[ChatEvent, None]:
        reason: str | None = None
        options = sampling | {"adapter": self._adapter}
        chunks = self._client.chat_chunks(messages, template_kwargs=template_kwargs, **options)
        async with aclosing(chunks):
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    if thought := delta.get("reasoning_content"):
                        yield ReasoningDelta(thought)
                    if content := delta.get("content"):
                        yield ContentDelta(content)
                    reason = choice["finish_reason"] or reason
                if (usage := chunk.get("usage")) is not None:
                    details = usage.get("prompt_tokens_details") or {}
                    cached = details.get("cached_tokens", 0)
                    yield AnswerEnd(Usage(usage["prompt_tokens"], usage["completion_tokens"], cached), reason)
                    return
        raise ServerError("the connection ended before the answer did")

"""Backends of the chat shell, an engine in this process or a server; both separate thoughts from content."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from aengine.errors import ServerError
from aengine.text.answer.deltas import ContentDelta, ReasoningDelta
from aengine.text.answer.harmony.parser import HarmonyParser
from aengine.text.answer.thought import ThoughtParser
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
        prompt = await self._engine.encode_chat(messages, template_kwargs=template_kwargs)
        form = self._engine.answer_format
        thinks = form.thoughts and sampling.get("structured") is None  # a given form leaves no room for thoughts
        parser: ThoughtParser | HarmonyParser | None = None
        if form.harmony:
            parser = HarmonyParser()
        elif thinks:
            parser = ThoughtParser(prompt.opens_thought, form.thought_markers)
        shown = (*sampling.get("shown_special_ids", ()), *form.shown_special_ids(thinks, None))
        options = sampling | {"shown_special_ids": shown, "adapter": self._adapter}
        async with aclosing(self._engine.generate(prompt.token_ids, **options)) as fragments:
            async for fragment in fragments:
                if parser is None:
                    yield ContentDelta(fragment.text)
                else:
                    done = fragment.finish_reason is not None
                    for delta in parser.feed(fragment.text) + (parser.finish() if done else []):
                        if isinstance(delta, (ReasoningDelta, ContentDelta)):
                            yield delta
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

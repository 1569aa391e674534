"""The encoder of OpenAI's chunks, for `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from aengine.http.bodies.requests import UsageShown
from aengine.http.engine_like import StreamLike
from aengine.http.openai.logprobs import usage_body
from aengine.http.streams import sse
from aengine.http.streams.responses import EventEncoder
from aengine.text.answer.deltas import ContentDelta, Delta, ReasoningDelta
from aengine.types import Fragment, Usage

_HOLE = sse.encode(sse.HOLE)


class ChunkEncoder(EventEncoder, ABC):
    """Encodes one request's chunks. A subclass writes the entry of one choice."""

    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_shown: UsageShown) -> None:
        """`head` has the fields that all chunks share: id, object, created, model."""
        self._head = head
        self._usage_shown = usage_shown
        self._prompt_tokens = stream.prompt_tokens
        self._completion_tokens = 0  # counted so far, where usage stands in every chunk
        self._around: dict[tuple[int, type[Delta]], list[bytes]] = {}  # by choice and kind: what surrounds a text

    @abstractmethod
    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """The entry in `choices`; `delta` is None where nothing is added to the text."""

    @abstractmethod
    def event(self, fragment: Fragment) -> bytes: ...

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: Usage | None) -> bytes:
        if self._usage_shown == "never" or usage is None:
            return sse.DONE
        return sse.event({**self._head, "choices": [], "usage": self._usage_body(usage)}) + sse.DONE

    def _piece(self, index: int, kind: type[ContentDelta | ReasoningDelta], text: str) -> bytes:
        """The chunk of a text without logprobs or finish_reason: chunks that differ in their text alone are encoded
        once.
        """
        if (around := self._around.get((index, kind))) is None:
            around = self._event(self._choice(index, kind(sse.HOLE))).split(_HOLE)
            if self._usage_shown != "always":
                self._around[index, kind] = around
        return sse.encode(text).join(around)

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": (choice,)}
        if self._usage_shown == "last":
            chunk["usage"] = None  # in all chunks but the last, says OpenAI
        elif self._usage_shown == "always":
            prompt, completion = self._prompt_tokens, self._completion_tokens
            chunk["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            }
        return sse.event(chunk)

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage)

"""OpenAI's chunks: what `/v1/completions` and `/v1/chat/completions` have in common when they stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from aengine.http.bodies.requests import UsageTold
from aengine.http.engine_like import StreamLike
from aengine.http.openai.logprobs import usage_body
from aengine.http.streams import sse
from aengine.types import Fragment, Usage


class OpenAIDialect(ABC):
    """One request's chunks. A subclass says how one choice's piece of text is worded."""

    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_told: UsageTold) -> None:
        """`head` has the fields that all chunks share: id, object, created, model."""
        self._head = head
        self._usage_told = usage_told
        self._prompt_tokens = stream.prompt_tokens
        self._completion_tokens = 0  # told so far
        self._plain: dict[int, bytes] = {}  # templates by choice

    @abstractmethod
    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        """The entry in `choices`; `fragment` brings logprobs and finish_reason, None means neither."""

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": choices}
        if self._usage_told == "last":
            chunk["usage"] = None  # in all chunks but the last, says OpenAI
        elif self._usage_told == "always":
            prompt, completion = self._prompt_tokens, self._completion_tokens
            told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
            chunk["usage"] = told
        return chunk

    def opening(self) -> bytes:
        return b""

    def event(self, fragment: Fragment) -> bytes:
        if self._usage_told == "always":
            self._completion_tokens += len(fragment.token_ids)
            if not fragment.text and fragment.finish_reason is None and fragment.logprobs is None:
                return b""
        elif fragment.finish_reason is None and fragment.logprobs is None:
            # Text may be held back: bytes of a character, the start of a stop string.
            return self._template(fragment.index) % sse.encode(fragment.text) if fragment.text else b""
        return sse.event(self._chunk(self._piece(fragment.index, fragment.text, fragment)))

    def _template(self, index: int) -> bytes:
        if (template := self._plain.get(index)) is None:
            template = sse.template(self._chunk(self._piece(index, sse.HOLE, None)))
            self._plain[index] = template
        return template

    def closing(self, usage: Usage | None) -> bytes:
        if self._usage_told == "never" or usage is None:
            return sse.DONE
        return sse.event({**self._head, "choices": [], "usage": self._usage_body(usage)}) + sse.DONE

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage)

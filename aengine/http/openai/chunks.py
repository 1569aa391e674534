"""Encodes streamed answers as OpenAI's chunks, for `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aengine.http.bodies.requests import UsageShown
from aengine.http.engine_like import StreamLike
from aengine.http.openai.logprobs import ChatLogprobs, CompletionLogprobs, usage_body
from aengine.http.streams import sse
from aengine.http.streams.sse import EventEncoder
from aengine.text.answer.deltas import Call, CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.parser import AnswerParser
from aengine.text.reading.answer_reading import ChoiceReader
from aengine.types import FinishReason, Fragment, Usage, is_cut

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


class CompletionChunkEncoder(ChunkEncoder):
    """Encodes chunks of `/v1/completions`; offsets into a choice's text run on from chunk to chunk."""

    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_shown: UsageShown) -> None:
        super().__init__(head, stream, usage_shown)
        self._logprobs: defaultdict[int, CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by choice

    def event(self, fragment: Fragment) -> bytes:
        if self._usage_shown == "always":
            self._completion_tokens += len(fragment.token_ids)
        if fragment.finish_reason is None and fragment.logprobs is None:
            # Text may be held back: bytes of a character, the start of a stop string.
            return self._piece(fragment.index, ContentDelta, fragment.text) if fragment.text else b""
        logprobs = self._logprobs[fragment.index].body(fragment.logprobs)
        return self._event(self._choice(fragment.index, ContentDelta(fragment.text), logprobs, fragment.finish_reason))

    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        text = delta.text if isinstance(delta, ContentDelta) else ""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class ChatChunkEncoder(ChunkEncoder):
    """Encodes chunks of `/v1/chat/completions`; one reader per choice separates thoughts and calls from content."""

    def __init__(
        self,
        head: dict[str, Any],
        stream: StreamLike,
        usage_shown: UsageShown,
        readers: Sequence[ChoiceReader],
        logprobs: ChatLogprobs | None,
    ) -> None:
        super().__init__(head, stream, usage_shown)
        self._readers = readers
        self._logprobs = logprobs

    def opening(self) -> bytes:
        """The chunks with the role, one per choice. Where content may stay away, it is null until it comes."""
        events = []
        for index, reader in enumerate(self._readers):
            role = {"role": "assistant", "content": "" if reader.parser.plain else None}
            events.append(self._event({"index": index, "delta": role, "logprobs": None, "finish_reason": None}))
        return b"".join(events)

    def event(self, fragment: Fragment) -> bytes:
        index, reason = fragment.index, fragment.finish_reason
        parser, thought = self._readers[index]
        if self._usage_shown == "always":
            self._completion_tokens += len(fragment.token_ids)
        ends = reason is not None or fragment.logprobs is not None  # with an event that is not encoded beforehand
        deltas: list[Delta]
        if plain := parser.plain:
            if not ends:  # text may be held back: bytes of a character, the start of a stop string
                return self._piece(index, ContentDelta, fragment.text) if fragment.text else b""
            deltas = [ContentDelta(fragment.text)] if fragment.text else []
        else:
            if thought is not None and self._usage_shown != "never":
                thought.feed(fragment.token_ids)
            deltas = parser.feed(fragment.text)
            if reason is not None:
                deltas += parser.finish(cut=is_cut(fragment))
        last = deltas.pop() if ends and deltas and (plain or reason is None) else None
        events = b""
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._event(self._choice(index, delta))
            else:
                events += self._piece(index, type(delta), delta.text)
        if ends:
            logprobs = None if self._logprobs is None else self._logprobs.body(fragment.logprobs)
            events += self._event(self._choice(index, last, logprobs, finish_reason(reason, parser)))
        return events

    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        body = {} if delta is None else delta_body(delta)
        return {"index": index, "delta": body, "logprobs": logprobs, "finish_reason": reason}

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, sum(reader.thought_tokens for reader in self._readers))


def call_body(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def delta_body(delta: Delta) -> dict[str, Any]:
    match delta:
        case ContentDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return {"reasoning_content": text, "reasoning": text}  # as some clients call it, and as others do
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    return {"tool_calls": [{"index": delta.index, **call_body(Call(delta.id, delta.name or "", delta.arguments))}]}


def finish_reason(reason: FinishReason | None, parser: AnswerParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.ends_with_calls else reason

"""Encodes answers of `/v1/chat/completions`: as chunks, and as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aengine.http.bodies.requests import UsageShown
from aengine.http.engine_like import StreamLike
from aengine.http.openai.chunks import ChunkEncoder
from aengine.http.openai.logprobs import ChatLogprobs, usage_body
from aengine.http.openai.reading import ChoiceReader
from aengine.text.answer.deltas import Answer, Call, CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.parser import AnswerParser
from aengine.types import Choice, Completion, FinishReason, Fragment, Usage


class ChatChunkEncoder(ChunkEncoder):
    """Encodes chunks; one reader per choice separates thoughts and calls from content."""

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
                deltas += parser.finish()
        last = deltas.pop() if ends and deltas and (plain or reason is None) else None
        events = b""
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._event(self._choice(index, delta))
            else:
                events += self._piece(index, type(delta), delta.text)
        if ends:
            logprobs = None if self._logprobs is None else self._logprobs.body(fragment.logprobs)
            events += self._event(self._choice(index, last, logprobs, _finish_reason(reason, parser)))
        return events

    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        body = {} if delta is None else _delta_body(delta)
        return {"index": index, "delta": body, "logprobs": logprobs, "finish_reason": reason}

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, sum(reader.thought_tokens for reader in self._readers))


async def chat_body(
    head: dict[str, Any], completion: Completion, readers: Sequence[ChoiceReader], logprobs: ChatLogprobs | None
) -> object:
    """The whole body of an answer that is not streamed."""
    choices = [await _choice_body(choice, readers[choice.index], logprobs) for choice in completion.choices]
    usage = usage_body(completion.usage, sum(reader.thought_tokens for reader in readers))
    return {**head, "choices": choices, "usage": usage}


async def _choice_body(choice: Choice, reader: ChoiceReader, logprobs: ChatLogprobs | None) -> dict[str, Any]:
    parser = reader.parser
    await reader.count_thought(choice.token_ids)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if not parser.plain:
        message |= _message_body(parser.read(choice.text))
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None if logprobs is None else await logprobs.encoded_body(choice.logprobs),
        "finish_reason": _finish_reason(choice.finish_reason, parser),
    }


def _message_body(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = {"content": answer.content or None}
    if answer.reasoning:
        body |= _delta_body(ReasoningDelta(answer.reasoning))
    if answer.calls:
        body["tool_calls"] = [_call_body(call) for call in answer.calls]
    return body


def _call_body(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _delta_body(delta: Delta) -> dict[str, Any]:
    match delta:
        case ContentDelta(text=text):
            return {"content": text}
        case ReasoningDelta(text=text):
            return {"reasoning_content": text, "reasoning": text}  # as some clients call it, and as others do
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    return {"tool_calls": [{"index": delta.index, **_call_body(Call(delta.id, delta.name or "", delta.arguments))}]}


def _finish_reason(reason: FinishReason | None, parser: AnswerParser) -> str | None:
    return "tool_calls" if reason == "stop" and parser.has_calls else reason

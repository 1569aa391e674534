"""How `/v1/chat/completions` words an answer: as chunks, and as one message."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aengine.http.bodies.requests import UsageTold
from aengine.http.engine_like import StreamLike
from aengine.http.openai.chunks import OpenAIDialect
from aengine.http.openai.logprobs import ChatLogprobs, usage_body
from aengine.http.openai.reading import ChoiceReader
from aengine.http.streams import sse
from aengine.text.answer.deltas import Answer, Call, CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.parser import AnswerParser
from aengine.types import Choice, Completion, FinishReason, Fragment, Usage

_SLICE = 1024  # tokens of a thought that are counted between two turns of the loop


class ChatDialect(OpenAIDialect):
    """Chunks; one reader per choice tells thoughts and calls from content."""

    def __init__(
        self,
        head: dict[str, Any],
        stream: StreamLike,
        usage_told: UsageTold,
        readers: Sequence[ChoiceReader],
        logprobs: ChatLogprobs,
    ) -> None:
        super().__init__(head, stream, usage_told)
        self._texts: dict[tuple[int, type[Delta]], bytes] = {}  # templates by choice and kind of text
        self._readers = readers
        self._logprobs = logprobs

    def opening(self) -> bytes:
        """The role, once per choice. Where content may stay away, it is null until it comes."""
        return b"".join(
            self._told(index, {"role": "assistant", "content": "" if reader.parser.plain else None})
            for index, reader in enumerate(self._readers)
        )

    def event(self, fragment: Fragment) -> bytes:
        index = fragment.index
        parser, thought = self._readers[index]
        if parser.plain:
            return super().event(fragment)
        if thought is not None and self._usage_told != "never":
            thought.feed(fragment.token_ids)
        deltas = parser.feed(fragment.text)
        if fragment.finish_reason is not None:
            deltas += parser.finish()
        if self._usage_told == "always":
            self._completion_tokens += len(fragment.token_ids)
        elif fragment.finish_reason is None and fragment.logprobs is None:
            return b"".join([self._piece_of(index, delta) for delta in deltas])
        worded = [_delta_body(delta) for delta in deltas]
        if fragment.finish_reason is not None or (fragment.logprobs is not None and not worded):
            worded.append({})
        if not worded:
            return b""
        *first, last = worded
        reason = _finish_reason(fragment.finish_reason, parser)
        return b"".join(self._told(index, delta) for delta in first) + self._told(index, last, fragment, reason)

    def _piece_of(self, index: int, delta: Delta) -> bytes:
        if isinstance(delta, CallDelta):
            return self._told(index, _delta_body(delta))
        kind = type(delta)
        if (template := self._texts.get((index, kind))) is None:
            choice = {"index": index, "delta": _delta_body(kind(sse.HOLE)), "logprobs": None, "finish_reason": None}
            template = self._texts[index, kind] = sse.template(self._chunk(choice))
        text = sse.encode(delta.text)
        return template % (text if kind is ContentDelta else (text, text))

    def _told(
        self, index: int, delta: dict[str, Any], fragment: Fragment | None = None, reason: str | None = None
    ) -> bytes:
        logprobs = None if fragment is None else self._logprobs.word(fragment.logprobs)
        return sse.event(self._chunk({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}))

    def _piece(self, index: int, text: str, fragment: Fragment | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": self._logprobs.word(fragment.logprobs) if fragment is not None else None,
            "finish_reason": fragment.finish_reason if fragment is not None else None,
        }

    def _usage_body(self, usage: Usage) -> dict[str, Any]:
        return usage_body(usage, sum(reader.thought_tokens for reader in self._readers))


async def word_completion(
    head: dict[str, Any], completion: Completion, readers: Sequence[ChoiceReader], logprobs: ChatLogprobs
) -> bytes:
    """The whole body of an answer that is not streamed."""
    choices = [await _choice_body(choice, readers[choice.index], logprobs) for choice in completion.choices]
    usage = usage_body(completion.usage, sum(reader.thought_tokens for reader in readers))
    return sse.encode({**head, "choices": choices, "usage": usage})


async def _choice_body(choice: Choice, reader: ChoiceReader, logprobs: ChatLogprobs) -> dict[str, Any]:
    parser, thought = reader
    for start in range(0, len(choice.token_ids), _SLICE):
        if thought is None or thought.over:
            break
        thought.feed(choice.token_ids[start : start + _SLICE])
        await asyncio.sleep(0)
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if not parser.plain:
        message |= _message_body(parser.read(choice.text))
    return {
        "index": choice.index,
        "message": message,
        "logprobs": await logprobs.raw(choice.logprobs),
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

"""Encodes streamed answers as OpenAI's chunks, for `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from aengine.http.engine_like import StreamLike
from aengine.http.openai.bodies import UsageShown
from aengine.http.openai.logprobs import ChatLogprobs, CompletionForm, CompletionLogprobs, usage_body
from aengine.http.streams import sse
from aengine.http.streams.sse import EventEncoder
from aengine.text.answer.deltas import Call, CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.reader import Reader
from aengine.types import FinishReason, Fragment, Usage

_NOTHING: Mapping[str, Any] = {}
_PLACEHOLDER = sse.encode(sse.PLACEHOLDER)


class ChunkEncoder(EventEncoder, ABC):
    """Encodes the chunks of one request. A subclass makes the entry of one choice."""

    def __init__(
        self, head: dict[str, Any], stream: StreamLike, usage_shown: UsageShown, shows_ids: bool = False
    ) -> None:
        """head: the fields of all chunks: id, object, created, model. shows_ids: whether chunks have token ids."""
        self._head = head
        self._shows_ids = shows_ids
        self._ids: defaultdict[int, list[int]] = defaultdict(list)  # by choice: ids for the next chunk
        self._counts = shows_ids or usage_shown == "always"  # chunks have ids or counts, so none can be reused
        self._usage_shown = usage_shown
        self._prompt_tokens = stream.prompt_tokens
        self._completion_tokens = 0  # so far, for chunks with usage
        # By choice and kind of delta: the encoded chunk before and after its text.
        self._around: dict[tuple[int, type[Delta]], list[bytes]] = {}

    @abstractmethod
    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        """Return the entry in `choices`. delta: None if no text is added."""

    @abstractmethod
    def event(self, fragment: Fragment) -> bytes: ...

    def closing(self, usage: Usage | None) -> bytes:
        if self._usage_shown == "never" or usage is None:
            return sse.DONE
        return sse.event({**self._head, "choices": [], "usage": self._usage_body(usage)}) + sse.DONE

    def _piece(self, index: int, kind: type[ContentDelta | ReasoningDelta], text: str) -> bytes:
        """Return the chunk of a text without logprobs or finish_reason. The JSON around the text is encoded once."""
        if (around := self._around.get((index, kind))) is None:
            around = self._event(self._choice(index, kind(sse.PLACEHOLDER))).split(_PLACEHOLDER)
            if not self._counts:
                self._around[index, kind] = around
        return sse.encode(text).join(around)

    def _count(self, fragment: Fragment) -> None:
        self._completion_tokens += len(fragment.token_ids)
        if self._shows_ids:
            self._ids[fragment.index] += fragment.token_ids

    def _event(self, choice: dict[str, Any], more: Mapping[str, Any] = _NOTHING) -> bytes:
        """Return the chunk of a choice. more: further fields of the chunk."""
        if self._shows_ids:
            choice["token_ids"] = self._ids.pop(choice["index"], ())
        chunk = {**self._head, **more, "choices": (choice,)}
        if self._usage_shown == "last":
            chunk["usage"] = None  # OpenAI's API has null in all chunks but the last
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
    """Encodes chunks of `/v1/completions`. Text offsets continue from chunk to chunk."""

    def __init__(self, head: dict[str, Any], stream: StreamLike, usage_shown: UsageShown, form: CompletionForm) -> None:
        super().__init__(head, stream, usage_shown, form.prompt_ids is not None)
        self._form = form
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice
        self._lengths: Counter[int] = Counter()  # characters sent, by choice
        self._begun: set[int] = set()  # choices whose prompt's ids have been sent

    def event(self, fragment: Fragment) -> bytes:
        if self._counts:
            self._count(fragment)
        if fragment.finish_reason is None and fragment.logprobs is None:
            # Text may be held back: the bytes of an incomplete character, or the start of a stop string.
            return self._piece(fragment.index, ContentDelta, fragment.text) if fragment.text else b""
        index, reason = fragment.index, fragment.finish_reason
        if (choice_logprobs := self._logprobs.get(index)) is None:
            choice_logprobs = self._logprobs[index] = self._form.logprobs(index)
        self._lengths[index] += len(fragment.text)
        logprobs = choice_logprobs.body(fragment.logprobs, self._lengths[index], ends=reason is not None)
        if logprobs is None and reason is None and not fragment.text:
            return b""  # the text is held back, so its tokens are held back too
        return self._event(self._choice(index, ContentDelta(fragment.text), logprobs, reason))

    def _choice(
        self, index: int, delta: Delta | None, logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:
        text = delta.text if isinstance(delta, ContentDelta) else ""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._shows_ids and index not in self._begun:
            self._begun.add(index)
            choice |= self._form.ids_of_prompt(index)
        return choice


class ChatChunkEncoder(ChunkEncoder):
    """Encodes chunks of `/v1/chat/completions`; one reader per choice separates thoughts and calls from content."""

    def __init__(
        self,
        head: dict[str, Any],
        stream: StreamLike,
        usage_shown: UsageShown,
        readers: Sequence[Reader],
        logprobs: ChatLogprobs | None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        """prompt_ids: the prompt's ids, if the request asks for ids."""
        super().__init__(head, stream, usage_shown, prompt_ids is not None)
        self._prompt_ids = prompt_ids
        self._readers = readers
        self._logprobs = logprobs
        if usage_shown == "never":
            for reader in readers:
                reader.skip_counting()

    def opening(self) -> bytes:
        """Return the chunks with the role, one for each choice. Content is null if the answer may have none."""
        events = []
        more = _NOTHING if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids}
        for index, reader in enumerate(self._readers):
            role = {"role": "assistant", "content": "" if reader.plain else None}
            events.append(self._event({"index": index, "delta": role, "logprobs": None, "finish_reason": None}, more))
            more = _NOTHING
        return b"".join(events)

    def event(self, fragment: Fragment) -> bytes:
        index, reason = fragment.index, fragment.finish_reason
        reader = self._readers[index]
        if self._counts:
            self._count(fragment)
        ends = reason is not None or fragment.logprobs is not None  # an event has more than a text
        plain = reader.plain
        if plain and not ends:  # text may be held back
            return self._piece(index, ContentDelta, fragment.text) if fragment.text else b""
        deltas = reader.feed(fragment)
        last = deltas.pop() if ends and deltas and (plain or reason is None) else None
        events = b""
        for delta in deltas:
            if isinstance(delta, CallDelta):
                events += self._event(self._choice(index, delta))
            else:
                events += self._piece(index, type(delta), delta.text)
        if ends:
            logprobs = None if self._logprobs is None else self._logprobs.body(fragment.logprobs)
            events += self._event(self._choice(index, last, logprobs, finish_reason(reason, reader)))
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
            return {"reasoning_content": text, "reasoning": text}  # clients read either name
    if delta.id is None:
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.arguments}}]}
    return {"tool_calls": [{"index": delta.index, **call_body(Call(delta.id, delta.name or "", delta.arguments))}]}


def finish_reason(reason: FinishReason | None, reader: Reader) -> str | None:
    return "tool_calls" if reason == "stop" and reader.ends_with_calls else reason

"""Encodes a streamed answer as Anthropic's events."""

from __future__ import annotations

from typing import Any, ClassVar

from aengine.errors import EngineFailedError
from aengine.http.anthropic.answer import SIGNATURE, AnswerPlan, begins_block
from aengine.http.anthropic.bodies import MessageUsage, OutputTokensDetails
from aengine.http.engine_like import StreamLike
from aengine.http.streams import sse
from aengine.http.streams.sse import EventEncoder
from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.reader import Reader
from aengine.types import Fragment, Usage


def error_event(body: object) -> bytes:
    """Return the event that ends a failing stream."""
    return b"event: error\n" + sse.event(body)


class MessageEventEncoder(EventEncoder):
    """Encodes one answer. Each block has a start event, delta events and a stop event."""

    ping: ClassVar[bytes] = sse.typed_event({"type": "ping"})

    def __init__(self, plan: AnswerPlan, stream: StreamLike, reader: Reader) -> None:
        self._plan = plan
        self._prompt_tokens = stream.prompt_tokens
        self._reader = reader
        self._index = -1  # of the latest block
        self._latest: Delta | None = None
        self._template = b""  # a format of the block's delta events, for their text; empty if the text is hidden
        self._last: Fragment | None = None

    def opening(self) -> bytes:
        """Return the message without content. The cached tokens of the prompt are known only at the end."""
        usage = MessageUsage(
            input_tokens=self._prompt_tokens,
            cache_read_input_tokens=0,
            output_tokens=0,
            output_tokens_details=OutputTokensDetails(0),
        )
        message = self._plan.message([], usage)
        return sse.typed_event({"type": "message_start", "message": message}) + self.ping

    def event(self, fragment: Fragment) -> bytes:
        reader = self._reader
        ends = fragment.finish_reason is not None
        if ends:
            self._last = fragment
        if not self._plan.max_tokens:
            return b""
        if reader.plain and isinstance(self._latest, ContentDelta) and not ends:
            return self._piece(fragment.text) if fragment.text else b""  # text may be held back
        events = b"".join(map(self._delta, reader.feed(fragment)))
        return events + self._stop() if ends else events

    def closing(self, usage: Usage | None) -> bytes:
        """Return the events with the stop reason and the usage. Raises `EngineFailedError` for an aborted answer."""
        if self._last is None or usage is None:
            raise EngineFailedError("the request was aborted")
        reason = self._plan.stop_reason(self._last, usage, self._reader.ends_with_calls)
        matched = self._last.stop_string if reason == "stop_sequence" else None
        ending = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": matched},
            "usage": self._plan.usage(usage, self._reader.thought_tokens),
        }
        return sse.typed_event(ending) + sse.typed_event({"type": "message_stop"})

    def error(self, body: object) -> bytes:
        return error_event(body)

    def _delta(self, delta: Delta) -> bytes:
        events = b""
        if begins_block(delta, self._latest):
            events = self._stop() + self._start(delta)
        self._latest = delta
        piece = delta.arguments if isinstance(delta, CallDelta) else delta.text
        return events + self._piece(piece) if piece else events

    def _piece(self, text: str) -> bytes:
        return self._template % sse.encode(text) if self._template else b""

    def _start(self, delta: Delta) -> bytes:
        self._index += 1
        block: dict[str, Any]
        match delta:
            case ContentDelta():
                block, piece = {"type": "text", "text": ""}, {"type": "text_delta", "text": sse.PLACEHOLDER}
            case ReasoningDelta():
                block = {"type": "thinking", "thinking": "", "signature": ""}
                piece = {"type": "thinking_delta", "thinking": sse.PLACEHOLDER}
            case CallDelta():
                block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                piece = {"type": "input_json_delta", "partial_json": sse.PLACEHOLDER}
        hidden = isinstance(delta, ReasoningDelta) and not self._plan.shows_thoughts
        self._template = b"" if hidden else sse.typed_template(self._block_delta(piece))
        return sse.typed_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _stop(self) -> bytes:
        """Return the events that end the latest block, if there is one."""
        if self._latest is None:
            return b""
        signed = isinstance(self._latest, ReasoningDelta)
        signature = {"type": "signature_delta", "signature": SIGNATURE}
        events = sse.typed_event(self._block_delta(signature)) if signed else b""
        return events + sse.typed_event({"type": "content_block_stop", "index": self._index})

    def _block_delta(self, delta: dict[str, str]) -> dict[str, object]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

"""Encodes a response, either as numbered events in OpenAI's order or as one body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aengine.http.entry.errors import ErrorBody, ErrorDetail
from aengine.http.responses.answer import Ending, ResponseHead, ending_of, usage_body
from aengine.http.responses.items import Event, GrowingItem, GrowingMessage, Output
from aengine.http.streams import sse
from aengine.http.streams.sse import EventEncoder
from aengine.text.answer.deltas import ContentDelta, Delta
from aengine.text.answer.reader import Reader
from aengine.types import Completion, FinishReason, Fragment, Usage

Keep = Callable[[dict[str, Any]], None]  # called with a finished response


def keep_nothing(body: dict[str, Any]) -> None:
    """Do nothing: the response is not kept."""


def failure_of(error: ErrorDetail) -> tuple[Event, Ending]:
    """Return the event for an error, and the ending of the response."""
    event = {"type": "error", "code": error.code or error.type, "message": error.message, "param": error.param}
    code = "invalid_prompt" if error.type == "invalid_request_error" else "server_error"
    return event, Ending("failed", error={"code": code, "message": error.message})


class ResponseEventEncoder(EventEncoder):
    """Encodes one response. The reader separates thoughts, calls and content; the output makes items from them."""

    def __init__(
        self,
        head: ResponseHead,
        output: Output,
        reader: Reader,
        keep: Keep = keep_nothing,
    ) -> None:
        self._head = head
        self._output = output
        self._reader = reader
        self._keep = keep
        self._number = 0  # the next event's number
        self._reason: FinishReason | None = None
        self._text_template = b""  # a format of the last item's text event, for the event's number and the text
        self._text_item: GrowingMessage | None = None  # the last item, if everything that follows is its text

    def opening(self) -> bytes:
        begun = self._head.body(Ending("in_progress"), [], None)
        return self._event({"type": "response.created", "response": begun}) + self._event(
            {"type": "response.in_progress", "response": begun}
        )

    def event(self, fragment: Fragment) -> bytes:
        if (plain := self._text_item) is not None and fragment.finish_reason is None:
            if not (text := fragment.text):  # held back
                return b""
            plain.pieces.append(text)
            return self._text_delta(plain, text)
        events = b"".join(map(self._add, self._reader.feed(fragment)))
        if fragment.finish_reason is not None:
            self._reason = fragment.finish_reason
        last = self._output.last
        if self._reader.plain and self._output.logprobs is None and isinstance(last, GrowingMessage):
            self._text_item = last
        return events

    def closing(self, usage: Usage | None) -> bytes:
        ending = ending_of(self._reason)
        events = b""
        rest = ContentDelta("", self._reader.take_logprobs())
        if ending.status == "completed" and self._output.has_only_thoughts:
            events += self._add(rest)  # clients expect at least an empty message
        elif isinstance(last := self._output.last, GrowingMessage):
            last.add(rest)
        events += self._end_item(ending)
        body = self._body(ending, usage)
        if ending.status != "failed":
            self._keep(body)
        return events + self._event({"type": f"response.{ending.status}", "response": body})

    def error(self, body: object) -> bytes:
        if not isinstance(body, ErrorBody):
            raise TypeError(f"an error's body is an ErrorBody, not a {type(body).__name__}")
        event, ending = failure_of(body.error)
        if (last := self._output.last) is not None:
            last.status = "incomplete"
        return self._event(event) + self._event({"type": "response.failed", "response": self._body(ending, None)})

    def _body(self, ending: Ending, usage: Usage | None) -> dict[str, Any]:
        used = None if usage is None else usage_body(usage, self._reader.thought_tokens)
        return self._head.body(ending, self._output.bodies(), used)

    def _add(self, delta: Delta) -> bytes:
        item, events = self._output.last, b""
        if item is None or not item.continues(delta):
            if item is not None:
                events += self._end_item(Ending("completed"))
            item = self._output.begin(delta)
            events += self._begin_item(item)
        text = item.add(delta)
        return events + self._text_delta(item, text) if text else events

    def _text_delta(self, item: GrowingItem, text: str) -> bytes:
        """Return the event with more text of the item."""
        if self._output.logprobs is not None and isinstance(item, GrowingMessage):
            more = {"type": f"{item.text_event}.delta", "delta": text, "logprobs": item.newest}
            return self._event(more, item.place)
        self._number += 1
        return self._text_template % (sse.encode(self._number - 1), sse.encode(text))

    def _begin_item(self, item: GrowingItem) -> bytes:
        more: Event = {
            "type": f"{item.text_event}.delta",
            "sequence_number": sse.PLACEHOLDER,
            **item.place,
            "delta": sse.PLACEHOLDER,
        }
        if isinstance(item, GrowingMessage):
            more["logprobs"] = ()
        self._text_template = sse.typed_template(more)
        added = {"type": "response.output_item.added", "output_index": item.index, "item": item.body()}
        return self._event(added) + b"".join(self._event(event, item.place) for event in item.opening())

    def _end_item(self, ending: Ending) -> bytes:
        """Return the events that end the last item. It is incomplete if the answer is."""
        item = self._output.last
        if item is None:
            return b""
        held = item.end()
        events = self._text_delta(item, held) if held else b""
        item.status = "completed" if ending.status == "completed" else "incomplete"
        events += b"".join(self._event(event, item.place) for event in item.closing())
        done = {"type": "response.output_item.done", "output_index": item.index, "item": item.body()}
        return events + self._event(done)

    def _event(self, event: Event, place: dict[str, Any] | None = None) -> bytes:
        kind, number = event["type"], self._number
        self._number += 1
        return sse.typed_event({"type": kind, "sequence_number": number, **(place or {}), **event})


async def response_body(head: ResponseHead, completion: Completion, output: Output, reader: Reader) -> dict[str, Any]:
    """Return the whole response, with the same items as in a stream's last event."""
    choice = completion.choices[0]
    for delta in await reader.read(choice):
        output.add(delta)
    ending = ending_of(choice.finish_reason)
    rest = ContentDelta("", reader.take_logprobs())
    if isinstance(output.last, GrowingMessage) or (ending.status == "completed" and output.has_only_thoughts):
        output.add(rest)
    if output.last is not None:
        output.last.end()
    for item in output.items:
        item.status = "completed" if ending.status == "completed" or item is not output.last else "incomplete"
    return head.body(ending, output.bodies(), usage_body(completion.usage, reader.thought_tokens))

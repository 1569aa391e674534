"""The items of an answer while the model writes them, and the events of each item."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.responses.answer import ItemStatus
from aengine.http.responses.custom_input import CustomInput
from aengine.http.responses.input import encode_thought
from aengine.http.responses.tools import CalledTool
from aengine.http.streams import sse
from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta

Event = dict[str, Any]  # an event's type and fields, without the item's place


class GrowingItem(ABC):
    """One item, whose text grows until it is done."""

    prefix: ClassVar[str]  # of the item's id
    text_event: ClassVar[str]  # the type of its text events, without `.delta` or `.done`
    text_field: ClassVar[str] = "text"  # the field for the whole text
    part_event: ClassVar[str] = ""  # the type of its part events; empty: it has no part
    part_place: ClassVar[dict[str, int]] = {}

    def __init__(self, index: int) -> None:
        self.id = f"{self.prefix}_{uuid.uuid4().hex}"
        self.index = index
        self.status: ItemStatus = "in_progress"
        self.pieces: list[str] = []  # of the text

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def place(self) -> dict[str, Any]:
        """The fields of events that identify the item and its part."""
        return {"item_id": self.id, "output_index": self.index, **self.part_place}

    @abstractmethod
    def continues(self, delta: Delta) -> bool:
        """Whether the delta belongs to this item."""

    def add(self, delta: Delta) -> str:
        """Add a piece, and return its text."""
        text = delta.arguments if isinstance(delta, CallDelta) else delta.text
        self.pieces.append(text)
        return text

    def end(self) -> str:
        """End the item, and return text that was held back."""
        return ""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the item for the answer."""

    def part(self, text: str) -> dict[str, Any]:
        """Return the part with the text."""
        return {"type": "", "text": text}

    def opening(self) -> list[Event]:
        """Return the events between the item's first event and its text events."""
        return [{"type": f"{self.part_event}.added", "part": self.part("")}] if self.part_event else []

    def closing(self) -> list[Event]:
        """Return the events between its text events and the item's last event."""
        text = self.text
        events: list[Event] = [{"type": f"{self.text_event}.done", self.text_field: text}]
        if self.part_event:
            events.append({"type": f"{self.part_event}.done", "part": self.part(text)})
        return events


class GrowingMessage(GrowingItem):
    """A message for the user."""

    prefix, text_event = "msg", "response.output_text"
    part_event, part_place = "response.content_part", {"content_index": 0}

    def __init__(self, index: int, form: ChatLogprobs | None) -> None:
        """form: the format of logprobs; None: the request asks for none."""
        super().__init__(index)
        self._form = form
        self._encoded: list[bytes] = []  # the logprobs so far, as items of a JSON list
        self.newest: object = ()  # the logprobs of the latest piece
        self.logprobs: object = ()  # of all tokens; set when the message ends

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, ContentDelta)

    def add(self, delta: Delta) -> str:
        if self._form is not None and isinstance(delta, ContentDelta):
            body = self._form.body(delta.logprobs)
            encoded = b"[]" if body is None else sse.encode(body["content"])
            if delta.logprobs:
                self._encoded.append(encoded[1:-1])
            self.newest = msgspec.Raw(encoded)
        return super().add(delta)

    def end(self) -> str:
        if self._form is not None:
            self.logprobs = msgspec.Raw(b"[%b]" % b",".join(self._encoded))
        return ""

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs}

    def body(self) -> dict[str, Any]:
        content = [] if self.status == "in_progress" else [self.part(self.text)]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def closing(self) -> list[Event]:
        done, part = super().closing()
        return [{**done, "logprobs": self.logprobs}, part]


class GrowingReasoning(GrowingItem):
    """A thought: as content, or as a summary if the request asks for one."""

    prefix = "rs"

    def __init__(self, index: int, *, encrypted: bool) -> None:
        super().__init__(index)
        self._encrypted = encrypted

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, ReasoningDelta)

    def body(self) -> dict[str, Any]:
        begun = self.status == "in_progress"
        parts = [] if begun else [self.part(self.text)]
        body = {"id": self.id, "type": "reasoning", "status": self.status, **self._fields(parts)}
        if self._encrypted:
            body["encrypted_content"] = None if begun else encode_thought(self.text)
        return body

    @abstractmethod
    def _fields(self, parts: list[dict[str, Any]]) -> dict[str, Any]: ...


class GrowingThought(GrowingReasoning):
    text_event = "response.reasoning_text"
    part_event, part_place = "response.content_part", {"content_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def _fields(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"summary": [], "content": parts}


class GrowingSummary(GrowingReasoning):
    text_event = "response.reasoning_summary_text"
    part_event, part_place = "response.reasoning_summary_part", {"summary_index": 0}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text", "text": text}

    def _fields(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        return {"summary": parts}


class GrowingCall(GrowingItem):
    """A function call."""

    prefix, text_event, text_field = "fc", "response.function_call_arguments", "arguments"
    kind: ClassVar[str] = "function_call"

    def __init__(self, index: int, delta: CallDelta, tool: CalledTool) -> None:
        super().__init__(index)
        self._number = delta.index
        self._call_id = delta.id
        self._tool = {"name": tool.name} | ({"namespace": tool.namespace} if tool.namespace is not None else {})

    def continues(self, delta: Delta) -> bool:
        return isinstance(delta, CallDelta) and delta.index == self._number

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.kind,
            "status": self.status,
            "call_id": self._call_id,
            **self._tool,
            self.text_field: self.text,
        }


class GrowingCustomCall(GrowingCall):
    """A call of a custom tool, whose input is text."""

    prefix, text_event, text_field = "ctc", "response.custom_tool_call_input", "input"
    kind = "custom_tool_call"

    def __init__(self, index: int, delta: CallDelta, tool: CalledTool) -> None:
        super().__init__(index, delta, tool)
        self._input = CustomInput()

    def add(self, delta: Delta) -> str:
        text = self._input.feed(delta.arguments) if isinstance(delta, CallDelta) else ""
        self.pieces.append(text)
        return text

    def end(self) -> str:
        text = self._input.finish()
        self.pieces.append(text)
        return text


class Output:
    """The items of one answer.

    called: by the names that the model uses, the tools as the client names them.
    logprobs: the format of messages' logprobs; None: the request asks for none.
    """

    def __init__(
        self,
        *,
        summaries: bool,
        encrypted: bool,
        called: Mapping[str, CalledTool],
        logprobs: ChatLogprobs | None = None,
    ) -> None:
        self._summaries = summaries
        self._encrypted = encrypted
        self._called = called
        self.logprobs = logprobs
        self.items: list[GrowingItem] = []

    @property
    def last(self) -> GrowingItem | None:
        """The item that is being written; None before the first one."""
        return self.items[-1] if self.items else None

    @property
    def has_only_thoughts(self) -> bool:
        """Whether there is neither a message nor a call."""
        return all(isinstance(item, GrowingReasoning) for item in self.items)

    def add(self, delta: Delta) -> None:
        """Add a piece to the last item, or begin the next item with it."""
        item = self.last
        if item is None or not item.continues(delta):
            if item is not None:
                item.end()
            item = self.begin(delta)
        item.add(delta)

    def begin(self, delta: Delta) -> GrowingItem:
        """Append and return the item that begins with this piece. The piece is not added to it."""
        index = len(self.items)
        item: GrowingItem
        match delta:
            case ContentDelta():
                item = GrowingMessage(index, self.logprobs)
            case ReasoningDelta():
                kind = GrowingSummary if self._summaries else GrowingThought
                item = kind(index, encrypted=self._encrypted)
            case CallDelta():
                tool = self._called[delta.name or ""]
                item = (GrowingCustomCall if tool.custom else GrowingCall)(index, delta, tool)
        self.items.append(item)
        return item

    def bodies(self) -> list[dict[str, Any]]:
        return [item.body() for item in self.items]

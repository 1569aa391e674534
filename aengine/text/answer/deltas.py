"""The pieces of an answer as it comes: thought, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from aengine.types import TokenLogprob, ToolCall, ToolCallDelta, join_calls


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of the thought before the answer."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """A piece of the answer's own text. logprobs: of its tokens, if `Reader.attach_logprobs` was called."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


Call = ToolCall
CallDelta = ToolCallDelta

Delta = ReasoningDelta | ContentDelta | CallDelta


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def join_deltas(deltas: Iterable[Delta]) -> Answer:
    """Join the pieces to the whole answer."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[CallDelta] = []
    for delta in deltas:
        match delta:
            case ContentDelta():
                content.append(delta.text)
            case ReasoningDelta():
                reasoning.append(delta.text)
            case CallDelta():
                calls.append(delta)
    return Answer("".join(content), "".join(reasoning), join_calls(calls))

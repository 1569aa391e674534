"""The pieces of an answer as it comes: thought, content, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True):
    """A piece of the thought before the answer."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    """A piece of what the user reads."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of a call's arguments, as the model wrote them. The first one of a call brings `id` and `name`."""

    index: int  # which of the answer's calls
    arguments: str
    id: str | None = None
    name: str | None = None


Delta = ReasoningDelta | ContentDelta | CallDelta


class Call(msgspec.Struct, frozen=True):
    """A whole call. `arguments` are JSON if the model made no mistake and was not cut short."""

    id: str
    name: str
    arguments: str


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    content: str
    reasoning: str
    calls: tuple[Call, ...]


def join_deltas(deltas: Iterable[Delta]) -> Answer:
    """Join the pieces to the whole answer."""
    content: list[str] = []
    reasoning: list[str] = []
    heads: list[tuple[str, str]] = []  # id and name
    arguments: list[list[str]] = []
    for delta in deltas:
        match delta:
            case ContentDelta():
                content.append(delta.text)
            case ReasoningDelta():
                reasoning.append(delta.text)
            case CallDelta():
                if delta.id is not None and delta.name is not None:
                    heads.append((delta.id, delta.name))
                    arguments.append([])
                arguments[delta.index].append(delta.arguments)
    calls = tuple(Call(*head, "".join(pieces)) for head, pieces in zip(heads, arguments, strict=True))
    return Answer("".join(content), "".join(reasoning), calls)

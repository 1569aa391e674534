"""Separates thoughts and calls from the text of a chat's fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from aengine.text.answer.deltas import CallDelta, ContentDelta, ReasoningDelta
from aengine.text.answer.parser import AnswerParser
from aengine.types import Fragment, is_cut


class ReadableStream(Protocol):
    """The stream of a request, from an engine."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def backlog(self) -> int: ...

    async def take(self) -> list[Fragment]: ...

    def abort(self) -> None: ...


class ReadStream:
    """A stream whose fragments have thoughts and calls apart from their text; one parser for each choice."""

    def __init__(self, stream: ReadableStream, parsers: Sequence[AnswerParser]) -> None:
        self.id = stream.id
        self.prompt_tokens = stream.prompt_tokens
        self._stream = stream
        self._parsers = parsers

    @property
    def backlog(self) -> int:
        """The number of fragments that wait to be taken."""
        return self._stream.backlog

    async def take(self) -> list[Fragment]:
        """As the engine's stream."""
        return [read_fragment(fragment, self._parsers[fragment.index]) for fragment in await self._stream.take()]

    def abort(self) -> None:
        """As the engine's stream."""
        self._stream.abort()


def read_fragment(fragment: Fragment, parser: AnswerParser) -> Fragment:
    """The fragment with what is complete now of the answer; `parser` has read those before it."""
    if parser.plain:
        return fragment
    deltas = parser.feed(fragment.text)
    if fragment.finish_reason is not None:
        deltas += parser.finish(cut=is_cut(fragment))
    return msgspec.structs.replace(
        fragment,
        text="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        tool_calls=tuple(delta for delta in deltas if isinstance(delta, CallDelta)),
    )

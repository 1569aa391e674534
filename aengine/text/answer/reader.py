"""Reads answers: the one place where fragments of an answer become deltas, which the encoders of every API take."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from aengine.text.answer.deltas import CallDelta, ContentDelta, Delta, ReasoningDelta
from aengine.text.answer.parser import AnswerParser
from aengine.text.answer.thought import ThoughtTokenCounter
from aengine.types import Choice, Fragment, TokenLogprob, is_cut

_CHARACTERS = 4096  # parsed between two turns of the event loop; only small pieces are parsed in linear time
_TOKENS = 1024  # counted between two turns of the event loop
_LOGPROBS = 64  # tokens with logprobs that are parsed between two turns of the event loop
_FURTHEST = 16  # characters in which a token's text is searched for; a token that is part of a character has no text


class Reader:
    """Reads one choice of an answer: its thought, content and calls, and how many tokens the thought has.

    feed() takes the choice's fragments in order, or read() takes the whole choice. Fragments keep their usage, finish
    reason and logprobs: an encoder takes these from them.
    """

    __slots__ = ("_last", "_logprobs", "_parser", "_thought", "_waiting", "plain")

    def __init__(self, parser: AnswerParser, thought: ThoughtTokenCounter | None = None) -> None:
        """thought: counts the thought's tokens; None if there is no thought, or the count is not needed."""
        self._parser = parser
        self._thought = thought
        self._logprobs = False  # whether content deltas have the logprobs of their tokens
        self._waiting: list[TokenLogprob] = []  # logprobs of content whose text is not certain
        self._last: type[Delta] | None = None  # the kind of the latest delta, if deltas have logprobs
        self.plain = parser.plain  # whether all further text is content, and nothing is held back

    @property
    def thought_tokens(self) -> int:
        """The number of tokens of the thought so far."""
        return 0 if self._thought is None else self._thought.count

    @property
    def ends_with_calls(self) -> bool:
        """Whether there are calls, and none of them was cut off."""
        return self._parser.ends_with_calls

    def skip_counting(self) -> None:
        """Do not count the thought's tokens. Call before the first fragment."""
        self._thought = None

    def attach_logprobs(self) -> None:
        """Give content deltas the logprobs of their tokens. Call before the first fragment.

        Text is then parsed token by token. Tokens of thoughts, calls and markers are in no delta.
        """
        self._logprobs = True

    def feed(self, fragment: Fragment) -> list[Delta]:
        """Return the deltas that are complete with this fragment. The last fragment also brings those held back."""
        if self._logprobs:
            return self._feed_with_logprobs(fragment)
        if self.plain:
            return [ContentDelta(fragment.text)] if fragment.text else []
        if self._thought is not None:
            self._thought.feed(fragment.token_ids)
        deltas = self._parser.feed(fragment.text)
        if fragment.finish_reason is not None:
            deltas += self._parser.finish(is_cut(fragment))
        self.plain = self._parser.plain
        return deltas

    async def read(self, choice: Choice) -> list[Delta]:
        """Return the deltas of a whole choice. Other tasks run in between."""
        deltas: list[Delta] = []
        if self._logprobs and choice.logprobs:
            for place, (token, text) in enumerate(_by_token(choice.text, choice.logprobs)):
                deltas += self._feed_token(token, text)
                if place % _LOGPROBS == 0:
                    await asyncio.sleep(0)
        else:
            for start in range(0, len(choice.token_ids), _TOKENS):
                if self._thought is None or self._thought.over or self._logprobs:
                    break
                if start:
                    await asyncio.sleep(0)
                self._thought.feed(choice.token_ids[start : start + _TOKENS])
            step = max(1, len(choice.text)) if self.plain else _CHARACTERS
            for start in range(0, len(choice.text), step):
                if start:
                    await asyncio.sleep(0)
                deltas += self._feed_text(choice.text[start : start + step])
        return deltas + self._finish(is_cut(choice))

    def take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Return the logprobs that wait for their text. After the last fragment they belong to the last content."""
        taken, self._waiting = tuple(self._waiting), []
        return taken

    def _feed_with_logprobs(self, fragment: Fragment) -> list[Delta]:
        tokens = fragment.logprobs
        if not tokens:
            deltas = self._feed_text(fragment.text)
        elif len(tokens) == 1:
            deltas = self._feed_token(tokens[0], fragment.text)
        else:
            deltas = [delta for one, text in _by_token(fragment.text, tokens) for delta in self._feed_token(one, text)]
        if fragment.finish_reason is not None:
            deltas += self._finish(is_cut(fragment))
        return deltas

    def _feed_text(self, text: str) -> list[Delta]:
        if not self.plain:
            deltas = self._parser.feed(text)
            self.plain = self._parser.plain
            return self._with_logprobs(deltas) if self._logprobs else deltas
        if not text:
            return []
        return [ContentDelta(text, self.take_logprobs()) if self._logprobs else ContentDelta(text)]

    def _feed_token(self, token: TokenLogprob, text: str) -> list[Delta]:
        """Parse one token's text. The logprobs of content wait until their text is certain."""
        thought = self._thought
        is_content = thought is None or thought.over
        if thought is not None and not is_content:
            thought.feed((token.token_id,))
            is_content = thought.absent  # if a thought ends here, the token belongs to its marker
        if is_content:
            if self._last is CallDelta:
                self._waiting.clear()  # these belong to the call
            self._waiting.append(token)
        return self._feed_text(text)

    def _finish(self, cut: bool) -> list[Delta]:
        if self.plain:
            return []
        deltas = self._parser.finish(cut)
        return self._with_logprobs(deltas) if self._logprobs else deltas

    def _with_logprobs(self, deltas: list[Delta]) -> list[Delta]:
        """Give waiting logprobs to content. Those before another delta belong to its marker."""
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                delta = ContentDelta(delta.text, self.take_logprobs())
            elif self._last is not None and self._last is not type(delta):
                self._waiting.clear()
            self._last = type(delta)
            found.append(delta)
        return found


def _by_token(text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[tuple[TokenLogprob, str]]:
    """Yield each token with its part of the text, as far as that can be found. The last one has the rest."""
    at = 0
    for index, one in enumerate(logprobs, 1):
        found = text.find(one.token, at, at + len(one.token) + _FURTHEST)
        end = len(text) if index == len(logprobs) else at if found < 0 else found + len(one.token)
        yield one, text[at:end]
        at = end


class StreamLike(Protocol):
    """The stream of one submitted request. Its owner must call `abort` at the end, in all cases."""

    @property
    def id(self) -> str: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def backlog(self) -> int:
        """The number of fragments waiting to be taken."""
        ...

    async def take(self) -> list[Fragment]:
        """Return all waiting fragments, at least one; `[]` after the last. Raises the request's error."""
        ...

    def abort(self) -> None:
        """Free the request's memory. Idempotent, and without effect on a finished request."""
        ...


class WrappedStream(ABC):
    """The base of streams that change the fragments of another one."""

    def __init__(self, stream: StreamLike) -> None:
        self.id = stream.id
        self.prompt_tokens = stream.prompt_tokens
        self._stream = stream

    @property
    def backlog(self) -> int:
        """See `StreamLike`."""
        return self._stream.backlog

    @abstractmethod
    async def take(self) -> list[Fragment]:
        """See `StreamLike`."""

    def abort(self) -> None:
        """See `StreamLike`."""
        self._stream.abort()


class ReadStream(WrappedStream):
    """A stream whose fragments hold thoughts, calls and content separately. It has one reader for each choice."""

    def __init__(self, stream: StreamLike, readers: Sequence[Reader]) -> None:
        super().__init__(stream)
        self._readers = readers
        for reader in readers:
            reader.skip_counting()  # fragments have no such count

    async def take(self) -> list[Fragment]:
        """See `StreamLike`."""
        return [_read_fragment(fragment, self._readers[fragment.index]) for fragment in await self._stream.take()]


def _read_fragment(fragment: Fragment, reader: Reader) -> Fragment:
    """Return the fragment with the parts of the answer that are complete now."""
    if reader.plain:
        return fragment
    deltas = reader.feed(fragment)
    return msgspec.structs.replace(
        fragment,
        text="".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)),
        reasoning="".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)),
        tool_calls=tuple(delta for delta in deltas if isinstance(delta, CallDelta)),
    )

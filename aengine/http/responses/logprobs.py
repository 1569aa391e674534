"""Logprobs of messages: those of an answer's tokens that are neither thought nor a call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.streams import sse
from aengine.text.answer.thought_tokens import ThoughtTokens
from aengine.types import TokenLogprob

_FURTHEST = 16  # characters between a token's text and where it is looked for: bytes of a character have no text


class MessageLogprobs:
    """Encodes the logprobs of one answer, and counts the tokens of its thought as it passes them over.

    Tokens that come before their text is certain are told with the next piece of it.
    """

    def __init__(self, form: ChatLogprobs, thought: ThoughtTokens | None) -> None:
        self._form = form
        self._thought = thought
        self._told: list[bytes] = []  # items of a JSON list, separated by commas; of the message that is being written
        self._waiting: list[bytes] = []

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        """Take the next tokens of the answer."""
        kept = self._outside_thought(token_ids, logprobs or ())
        if kept and (body := self._form.body(kept)) is not None:
            self._waiting.append(sse.encode(body["content"])[1:-1])

    def drop(self, *, but_last: bool = False) -> None:
        """Forget what waits, which belonged to a call; but perhaps what was fed last."""
        self._waiting = self._waiting[-1:] if but_last else []

    def take(self) -> msgspec.Raw:
        """The list of those that wait."""
        taken = b",".join(self._waiting)
        self._told += self._waiting
        self._waiting.clear()
        return msgspec.Raw(b"[%b]" % taken)

    def end(self) -> msgspec.Raw:
        """End a message: the list of all its tokens, those that still wait included."""
        self.take()
        told = b",".join(self._told)
        self._told.clear()
        return msgspec.Raw(b"[%b]" % told)

    def _outside_thought(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        thought = self._thought
        ended = thought is None or thought.over
        if thought is None or ended:
            return logprobs
        kept = []
        for token_id, logprob in zip(token_ids, logprobs, strict=False):
            thought.feed((token_id,))
            if thought.over and (ended or not thought.begun):
                kept.append(logprob)
            ended = thought.over  # the token that ends it is its marker's
        return kept


def by_token(text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[tuple[TokenLogprob, str]]:
    """Each token with its part of the text, as far as that can be told; the last one has the rest."""
    at = 0
    for index, one in enumerate(logprobs, 1):
        found = text.find(one.token, at, at + len(one.token) + _FURTHEST)
        end = len(text) if index == len(logprobs) else at if found < 0 else found + len(one.token)
        yield one, text[at:end]
        at = end

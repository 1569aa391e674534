"""Logprobs of a message: those of an answer's tokens that are no thought."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from aengine.http.openai.logprobs import ChatLogprobs
from aengine.http.streams import sse
from aengine.text.answer.thought_tokens import ThoughtTokens
from aengine.types import TokenLogprob

_SLICE = 1024  # tokens between two turns of the loop


class MessageLogprobs:
    """Encodes the logprobs of one answer, and counts the tokens of its thought as it passes them over.

    Tokens that come before their text is certain are told with the next piece of it.
    """

    def __init__(self, form: ChatLogprobs, thought: ThoughtTokens | None) -> None:
        self._form = form
        self._thought = thought
        self._told: list[bytes] = []  # items of a JSON list, separated by commas
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

    def all(self) -> msgspec.Raw:
        """The list of all, those that still wait included."""
        self.take()
        return msgspec.Raw(b"[%b]" % b",".join(self._told))

    async def whole(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], characters: int | None) -> object:
        """The list of a whole answer's, encoded a slice at a time; up to so many characters, where calls follow."""
        kept: list[TokenLogprob] = []
        for start in range(0, len(token_ids), _SLICE):
            kept += self._outside_thought(token_ids[start : start + _SLICE], logprobs[start : start + _SLICE])
            await asyncio.sleep(0)
        if characters is not None:
            ends = accumulate((len(one.token) for one in kept), initial=0)
            kept = [one for one, begin in zip(kept, ends, strict=False) if begin < characters]
        body = await self._form.encoded_body(kept)
        return () if body is None else body["content"]

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

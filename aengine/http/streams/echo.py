"""`echo`: a stream that begins each of its choices with the prompt, as if that had been drawn too."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import msgspec

from aengine.http.engine_like import StreamLike, TokenizerLike
from aengine.http.streams.slices import SLICE
from aengine.types import Fragment, PromptLogprob, TokenLogprob, TopLogprob, Usage


class EchoingStream:
    """Another stream's fragments, the prompt's text and logprobs in front of each choice's own.

    `ids` are the prompt's where `logprobs` are wanted, with so many candidates. With `mute` nothing that was drawn
    is told (max_tokens 0: one token is drawn because the engine draws at least one).
    """

    def __init__(
        self,
        stream: StreamLike,
        tokenizer: TokenizerLike,
        text: str,
        ids: Sequence[int],
        logprobs: int | None,
        mute: bool,
    ) -> None:
        self.id = stream.id
        self.prompt_tokens = stream.prompt_tokens
        self._stream = stream
        self._tokenizer = tokenizer
        self._text = text
        self._ids = ids
        self._logprobs = logprobs
        self._mute = mute
        self._begun: set[int] = set()  # choices

    @property
    def backlog(self) -> int:
        return self._stream.backlog

    async def take(self) -> list[Fragment]:
        return [await self._echoing(fragment) for fragment in await self._stream.take()]

    def abort(self) -> None:
        self._stream.abort()

    async def _echoing(self, fragment: Fragment) -> Fragment:
        if self._mute:
            fragment = _muted(fragment)
        if fragment.index in self._begun:
            return fragment
        self._begun.add(fragment.index)
        logprobs = fragment.logprobs
        if self._logprobs is not None and fragment.prompt_logprobs is not None:
            logprobs = (*await self._words(fragment.prompt_logprobs, self._logprobs), *(logprobs or ()))
        return msgspec.structs.replace(fragment, text=self._text + fragment.text, logprobs=logprobs)

    async def _words(self, scores: Sequence[PromptLogprob], count: int) -> list[TokenLogprob]:
        text, first = self._tokenizer.token_text, self._ids[0]
        words = [TokenLogprob(first, text(first), math.nan)]  # it follows nothing
        for place, score in enumerate(scores):
            if place % SLICE == 0:
                await asyncio.sleep(0)
            candidates = zip(score.top_ids[:count], score.top[:count], strict=True)
            top = tuple(TopLogprob(one, text(one), logprob) for one, logprob in candidates)
            words.append(TokenLogprob(score.token_id, text(score.token_id), score.logprob, top))
        return words


def _muted(fragment: Fragment) -> Fragment:
    usage = fragment.usage
    return msgspec.structs.replace(
        fragment,
        text="",
        token_ids=(),
        logprobs=None,
        finish_reason="length" if fragment.finish_reason == "stop" else fragment.finish_reason,
        usage=None if usage is None else Usage(usage.prompt_tokens, 0, usage.cached_tokens),
    )

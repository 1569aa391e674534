"""`echo`: a stream that repeats the prompt before each choice, as if it had been generated."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import msgspec

from aengine.http.engine_like import StreamLike, TokenizerLike
from aengine.http.streams.fragments import SLICE
from aengine.text.answer.reader import WrappedStream
from aengine.types import Fragment, PromptLogprob, TokenLogprob, TopLogprob, Usage


class EchoingStream(WrappedStream):
    """Wraps a stream, and adds the prompt's text and logprobs before each choice's own.

    ids: the prompt's ids, if the request asks for logprobs.
    logprobs: the number of candidates; None for no logprobs.
    mute: hide the generated token. With max_tokens 0 the engine still generates one.
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
        super().__init__(stream)
        self._tokenizer = tokenizer
        self._text = text
        self._ids = ids
        self._logprobs = logprobs
        self._mute = mute
        self._begun: set[int] = set()  # choices whose prompt has been repeated
        self._prompt_logprobs: Sequence[TokenLogprob] | None = None  # of the prompt; shared by all choices

    async def take(self) -> list[Fragment]:
        taken: list[Fragment] = []
        for fragment in await self._stream.take():
            if self._mute:
                fragment = _muted(fragment)
            if fragment.index not in self._begun:
                self._begun.add(fragment.index)
                taken += await self._echo(fragment)
            taken.append(fragment)
        return taken

    async def _echo(self, fragment: Fragment) -> list[Fragment]:
        """Return the prompt as fragments, the first of which has its text."""
        if self._logprobs is None or fragment.prompt_logprobs is None:
            return [Fragment(self._text, index=fragment.index, prompt_logprobs=fragment.prompt_logprobs)]
        if self._prompt_logprobs is None:
            self._prompt_logprobs = await self._token_logprobs(fragment.prompt_logprobs, self._logprobs)
        shared = self._prompt_logprobs
        pieces = [tuple(shared[start : start + SLICE]) for start in range(0, len(shared), SLICE)]
        begin = Fragment(self._text, (), pieces[0], index=fragment.index, prompt_logprobs=fragment.prompt_logprobs)
        return [begin, *(Fragment("", (), piece, index=fragment.index) for piece in pieces[1:])]

    async def _token_logprobs(self, scores: Sequence[PromptLogprob], count: int) -> list[TokenLogprob]:
        text, first = self._tokenizer.token_text, self._ids[0]
        logprobs = [TokenLogprob(first, text(first), math.nan)]  # the first token has no logprob
        for place, score in enumerate(scores):
            if place % SLICE == 0:
                await asyncio.sleep(0)
            candidates = zip(score.top_ids[:count], score.top[:count], strict=True)
            top = tuple(TopLogprob(one, text(one), logprob) for one, logprob in candidates)
            logprobs.append(TokenLogprob(score.token_id, text(score.token_id), score.logprob, top))
        return logprobs


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

"""Logprobs of prompts, as vLLM words them, without keeping the loop from anything else for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aengine.http.engine_like import StreamLike, TokenizerLike
from aengine.http.streams.slices import EncodedList, raw_list
from aengine.types import Fragment, PromptLogprob

ToldPrompt = Callable[[int], dict[str, Any]]  # by choice: what its prompt adds to an answer


def told_nothing(index: int) -> dict[str, Any]:
    """Where nobody asked."""
    return {}


class WordedPrompts:
    """A stream that words the prompt logprobs in its fragments as they come."""

    def __init__(self, stream: StreamLike, tokenizer: TokenizerLike) -> None:
        self.id = stream.id
        self.prompt_tokens = stream.prompt_tokens
        self._stream = stream
        self._tokenizer = tokenizer
        self._worded: dict[int, tuple[Sequence[PromptLogprob], EncodedList]] = {}  # by choice

    @property
    def backlog(self) -> int:
        return self._stream.backlog

    async def take(self) -> list[Fragment]:
        fragments = await self._stream.take()
        for fragment in fragments:
            if (scores := fragment.prompt_logprobs) is not None:
                # The choices of one prompt share the list.
                known = (worded for one, worded in self._worded.values() if one is scores)
                self._worded[fragment.index] = (scores, next(known, None) or await self._word(scores))
        return fragments

    def abort(self) -> None:
        self._stream.abort()

    def of(self, index: int) -> dict[str, Any]:
        """`prompt_logprobs`: for each token of the prompt its candidates by id, itself first among them.

        None for the first token, which follows nothing. Nothing at all for a choice that ended before it began.
        """
        worded = self._worded.get(index)
        return {} if worded is None else {"prompt_logprobs": worded[1]}

    async def _word(self, scores: Sequence[PromptLogprob]) -> EncodedList:
        return await raw_list([None, *scores], self._candidates)

    def _candidates(self, score: PromptLogprob | None) -> dict[str, Any] | None:
        if score is None:
            return None
        text = self._tokenizer.token_text
        found = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text(token_id)}
            for rank, (token_id, logprob) in enumerate(zip(score.top_ids, score.top, strict=True), 1)
        }
        own = {"logprob": score.logprob, "rank": score.rank, "decoded_token": text(score.token_id)}
        return {str(score.token_id): own} | {name: one for name, one in found.items() if name != str(score.token_id)}


def told_prompts(stream: StreamLike, tokenizer: TokenizerLike, asked: int | None) -> tuple[StreamLike, ToldPrompt]:
    """The stream to read, and what it will have told of each choice's prompt: nothing unless asked."""
    if asked is None:
        return stream, told_nothing
    worded = WordedPrompts(stream, tokenizer)
    return worded, worded.of

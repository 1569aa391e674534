"""Logprobs of prompts in vLLM's format, encoded in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aengine.http.engine_like import StreamLike, TokenizerLike
from aengine.http.streams.document import EncodedList, encoded_list
from aengine.text.answer.reader import WrappedStream
from aengine.types import Fragment, PromptLogprob

PromptLogprobsOf = Callable[[int], dict[str, Any]]  # by choice: the fields that prompt logprobs add to an answer


def no_prompt_logprobs(index: int) -> dict[str, Any]:
    """Return no fields, for a request without `prompt_logprobs`."""
    return {}


class PromptLogprobsStream(WrappedStream):
    """Wraps a stream, and encodes the prompt logprobs in its fragments as they arrive."""

    def __init__(self, stream: StreamLike, tokenizer: TokenizerLike) -> None:
        super().__init__(stream)
        self._tokenizer = tokenizer
        self._encoded: dict[int, tuple[Sequence[PromptLogprob], EncodedList]] = {}  # by choice

    async def take(self) -> list[Fragment]:
        fragments = await self._stream.take()
        for fragment in fragments:
            if (scores := fragment.prompt_logprobs) is not None:
                # The choices of one prompt share the list.
                encoded = (body for other, body in self._encoded.values() if other is scores)
                self._encoded[fragment.index] = (scores, next(encoded, None) or await self._encode(scores))
        return fragments

    def answer_fields(self, index: int) -> dict[str, Any]:
        """Return the field `prompt_logprobs` of a choice: for each token of the prompt its candidates by id.

        The token itself comes first. The prompt's first token has null. There is no field if the choice ended before
        its prompt was computed.
        """
        body = self._encoded.get(index)
        return {} if body is None else {"prompt_logprobs": body[1]}

    async def _encode(self, scores: Sequence[PromptLogprob]) -> EncodedList:
        return await encoded_list([None, *scores], self._candidates)

    def _candidates(self, score: PromptLogprob | None) -> dict[str, Any] | None:
        if score is None:
            return None
        text = self._tokenizer.token_text
        found = {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text(token_id)}
            for rank, (token_id, logprob) in enumerate(zip(score.top_ids, score.top, strict=True), 1)
        }
        own = {"logprob": score.logprob, "rank": score.rank, "decoded_token": text(score.token_id)}
        return {str(score.token_id): own} | {
            name: other for name, other in found.items() if name != str(score.token_id)
        }


def with_prompt_logprobs(
    stream: StreamLike, tokenizer: TokenizerLike, count: int | None
) -> tuple[StreamLike, PromptLogprobsOf]:
    """Return the stream to read, and a function for the fields that its prompt logprobs add to a choice.

    count: the candidates of each token; None: the request asks for no prompt logprobs.
    """
    if count is None:
        return stream, no_prompt_logprobs
    prompt_logprobs = PromptLogprobsStream(stream, tokenizer)
    return prompt_logprobs, prompt_logprobs.answer_fields

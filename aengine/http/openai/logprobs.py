"""Usage, and logprobs in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from aengine.http.streams.slices import encoded_list
from aengine.types import TokenLogprob, TopLogprob, Usage


def usage_body(usage: Usage, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """The `usage` of an answer. `reasoning_tokens`: the completion's tokens that are thoughts; None where nobody tells
    them apart.
    """
    details = {} if reasoning_tokens is None else {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


class ChatLogprobs:
    """Logprobs as `/v1/chat/completions` has them: a list of tokens under `content`."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` tells a token's own bytes: a part of a character has no text of its own."""
        self._bytes_of = bytes_of

    def body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if logprobs is None else {"content": [self._with_top(one) for one in logprobs]}

    async def encoded_body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """The body for a whole answer, encoded a slice at a time."""
        return None if logprobs is None else {"content": await encoded_list(logprobs, self._with_top)}

    def _with_top(self, one: TokenLogprob) -> dict[str, Any]:
        return {**self._candidate(one), "top_logprobs": [self._candidate(top) for top in one.top]}

    def _candidate(self, one: TokenLogprob | TopLogprob) -> dict[str, Any]:
        own = self._bytes_of(one.token_id) if "\ufffd" in one.token else one.token.encode()
        return {"token": one.token, "logprob": one.logprob, "bytes": list(own)}


class CompletionLogprobs:
    """Logprobs as `/v1/completions` has them: parallel lists, with offsets into the text that run on from chunk to
    chunk.
    """

    def __init__(self) -> None:
        self._offset = 0  # characters

    def body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {**self._plain(logprobs), "top_logprobs": [_by_text(one) for one in logprobs]}

    async def encoded_body(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """The body for a whole answer, its candidates encoded a slice at a time."""
        if logprobs is None:
            return None
        return {**self._plain(logprobs), "top_logprobs": await encoded_list(logprobs, _by_text)}

    def _plain(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(one.token)
        return {
            "tokens": [one.token for one in logprobs],
            "token_logprobs": [None if math.isnan(one.logprob) else one.logprob for one in logprobs],
            "text_offset": offsets,
        }


def _by_text(one: TokenLogprob) -> dict[str, float] | None:
    """Logprobs by token text: the candidates and, as OpenAI has it, always the sampled token; of two with the same text
    the likelier.

    None for a prompt's first token, which follows nothing.
    """
    if math.isnan(one.logprob):
        return None
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.token, top.logprob)
    found.setdefault(one.token, one.logprob)
    return found

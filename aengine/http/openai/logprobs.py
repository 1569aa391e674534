"""What the answers of several endpoints have in common: usage, and logprobs in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from aengine.http.streams.slices import raw_list
from aengine.types import TokenLogprob, Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """As `/v1/chat/completions` has them: a list of tokens under `content`."""
    return None if logprobs is None else {"content": [_with_top(one) for one in logprobs]}


async def raw_chat_logprobs(logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """The same of a whole answer, worded a few tokens at a time."""
    return None if logprobs is None else {"content": await raw_list(logprobs, _with_top)}


def _with_top(one: TokenLogprob) -> dict[str, Any]:
    top = [_candidate(top.token, top.logprob) for top in one.top]
    return {**_candidate(one.token, one.logprob), "top_logprobs": top}


def _candidate(token: str, logprob: float) -> dict[str, Any]:
    # A token that is only part of a character has no text of its own, so its bytes are not known here.
    return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}


class CompletionLogprobs:
    """As `/v1/completions` has them: parallel lists, with offsets into the text that run on from chunk to chunk."""

    def __init__(self) -> None:
        self._offset = 0  # characters

    def word(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {**self._plain(logprobs), "top_logprobs": [_by_text(one) for one in logprobs]}

    async def raw(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        """The same of a whole answer, its candidates worded a few tokens at a time."""
        if logprobs is None:
            return None
        return {**self._plain(logprobs), "top_logprobs": await raw_list(logprobs, _by_text)}

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
    """The candidates and, as OpenAI has it, always the sampled token; of two with the same text the likelier.

    None for a prompt's first token, which follows nothing.
    """
    if math.isnan(one.logprob):
        return None
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.token, top.logprob)
    found.setdefault(one.token, one.logprob)
    return found

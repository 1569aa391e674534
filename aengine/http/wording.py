"""What the answers of several endpoints have in common: usage, and logprobs in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    if logprobs is None:
        return None
    return {
        "content": [
            {
                **_candidate(one.token, one.logprob),
                "top_logprobs": [_candidate(top.token, top.logprob) for top in one.top],
            }
            for one in logprobs
        ]
    }


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
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(one.token)
        return {
            "tokens": [one.token for one in logprobs],
            "token_logprobs": [None if math.isnan(one.logprob) else one.logprob for one in logprobs],
            "top_logprobs": [None if math.isnan(one.logprob) else _by_text(one) for one in logprobs],
            "text_offset": offsets,
        }


def _by_text(one: TokenLogprob) -> dict[str, float]:
    """The candidates and, as OpenAI has it, always the sampled token; of two with the same text the likelier."""
    found: dict[str, float] = {}
    for top in one.top:
        found.setdefault(top.token, top.logprob)
    found.setdefault(one.token, one.logprob)
    return found

"""Logprobs of prompts, as vLLM words them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aengine.types import PromptLogprob

TokenText = Callable[[int], str]


def prompt_part(scores: Sequence[PromptLogprob] | None, text: TokenText) -> dict[str, Any]:
    """`prompt_logprobs`: for each token of the prompt its candidates by id, itself among them.

    None for the first token, which follows nothing; nothing at all where nobody asked.
    """
    if scores is None:
        return {}
    return {"prompt_logprobs": [None, *(_candidates(score, text) for score in scores)]}


def _candidates(score: PromptLogprob, text: TokenText) -> dict[str, Any]:
    found = {
        str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text(token_id)}
        for rank, (token_id, logprob) in enumerate(zip(score.top_ids, score.top, strict=True), 1)
    }
    own = {"logprob": score.logprob, "rank": score.rank, "decoded_token": text(score.token_id)}
    return found | {str(score.token_id): own}

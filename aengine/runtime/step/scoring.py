"""Computes logprobs of a prompt's tokens. The language model head runs over all positions, one slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.requests.sampling_params import MAX_LOGPROBS
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan
from aengine.types import PromptLogprob

SLICE = 256  # positions whose logits exist at once, however long the prompt is


@dataclass(slots=True)
class ChunkScores:
    """The likelihood of each prompt token given the tokens before it, for one prefill chunk."""

    logprobs: Tensor  # [n] float32, before temperature, penalties and filters
    ranks: Tensor  # [n] int64, 1 for the likeliest token
    top_ids: Tensor  # [n, k] int64, likeliest first
    top: Tensor  # [n, k] float32

    def mapped(self, to_host: Callable[[Tensor], Tensor]) -> ChunkScores:
        """Return a copy with `to_host` applied to every tensor."""
        return ChunkScores(*map(to_host, (self.logprobs, self.ranks, self.top_ids, self.top)))


def score_chunks(plan: StepPlan, head: Callable[[slice], Tensor], rows: Rows) -> list[ChunkScores]:
    """Return scores for each chunk with `score_ids`, in the plan's order.

    head: returns the logits [n, vocab] of a slice of the step's tokens. Decodes are the first tokens.
    """
    scores: list[ChunkScores] = []
    first = plan.decode_tokens
    for chunk in plan.prefill:
        if count := len(chunk.score_ids):
            targets = rows.upload(chunk.score_ids)
            parts = [
                _score(head(slice(first + at, first + min(at + SLICE, count))), targets[at : at + SLICE], chunk.top)
                for at in range(0, count, SLICE)
            ]
            scores.append(
                ChunkScores(
                    torch.cat([part.logprobs for part in parts]),
                    torch.cat([part.ranks for part in parts]),
                    torch.cat([part.top_ids for part in parts]),
                    torch.cat([part.top for part in parts]),
                )
            )
        first += len(chunk.token_ids)
    return scores


def read_scores(scores: Sequence[ChunkScores], plan: StepPlan) -> list[list[PromptLogprob]]:
    """Return the scores as the scheduler needs them, one list for each scored chunk."""
    scored = [chunk for chunk in plan.prefill if chunk.score_ids]
    return [
        [
            PromptLogprob(*values)
            for values in zip(
                chunk.score_ids,
                one.logprobs.tolist(),
                one.ranks.tolist(),
                one.top_ids.tolist(),
                one.top.tolist(),
                strict=True,
            )
        ]
        for chunk, one in zip(scored, scores, strict=True)
    ]


def _score(logits: Tensor, targets: Tensor, top: int) -> ChunkScores:
    """Score one slice. logits [n, vocab] in the model's dtype, targets [n] int64."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    own = logits.gather(1, targets[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    # k is always the largest number that a request may ask for, so that ties are broken in the same way for all.
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    return ChunkScores(own[:, 0] - total, ranks, ids[:, :top], values[:, :top] - total[:, None])

"""Log-probabilities under the raw distribution: before bias, penalties, masks and temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.requests.sampling_params import MAX_LOGPROBS


@dataclass(slots=True)
class DrawLogprobs:
    """One line per draw, likeliest candidates first; zeros for draws whose row did not ask."""

    sampled: Tensor  # [draws] float32
    top_ids: Tensor  # [draws, k] int64
    top: Tensor  # [draws, k] float32


def raw_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """All log-probabilities [n, vocab] (a new tensor), and the ids and values of the k largest [n, k].

    The search is always for as many as anyone may ask for, so that which of several equals make the cut does not
    depend on what other rows in the batch want.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if k == 0:
        none = logprobs[:, :0]
        return logprobs, none.long(), none
    top, top_ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=-1)
    return logprobs, top_ids[:, :k], top[:, :k]

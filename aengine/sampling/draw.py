"""Draws tokens from logits in torch (greedy, from all tokens, or from the likeliest), and log-probabilities.

On a CPU these functions draw. On CUDA they are the reference for the kernels of `fused`. They are pure functions of
tensors: logits [rows, vocab] float32, and parameters [rows, 1]. Rows do not affect each other, and shapes are fixed.
There is no host sync: the host knows which function a row needs.

A draw is the argmax of logits + temperature * noise. It equals the argmax of logits / temperature + noise, but does
not overflow at a tiny temperature. A filter is the lowest logit to keep. Tokens with the same logit as the last kept
token are kept too, so their order does not matter.

Log-probabilities belong to the raw logits, before bias, penalties, masks and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aengine.requests.sampling_params import MAX_LOGPROBS
from aengine.sampling.noise import gumbel


class Noise(NamedTuple):
    """The inputs from which `gumbel` computes the noise of rows. All are int32."""

    codes: Tensor  # [vocab], or one for each token that is drawn from
    key0: Tensor  # [rows, 1]
    key1: Tensor  # [rows, 1]


def draw_greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token of each row, [rows] int64. Among equals it is the lowest id."""
    return logits.argmax(dim=-1)


def draw_plain(logits: Tensor, noise: Noise, temperature: Tensor, log_min_p: Tensor | None) -> Tensor:
    """Draw from softmax(logits / temperature), without tokens less likely than min_p times the maximum: [rows] int64.

    log_min_p: [rows, 1], -inf for rows without min_p. None: no row has min_p.
    """
    if log_min_p is not None:
        logits = _keep(logits, logits.amax(dim=-1, keepdim=True) + temperature * log_min_p)
    return gumbel(*noise).mul_(temperature).add_(logits).argmax(dim=-1)


def candidates(logits: Tensor, noise: Noise, temperature: Tensor, first: int) -> Tensor:
    """Draw like `draw_plain` from part of the vocabulary. Returns candidates for `choose`, int32 [rows, 4].

    logits [rows, n] and the codes of the noise [n] are those of the tokens from id `first` on. The four numbers of a
    candidate are the bits of its float32 score, its token id, 1 if a logit is NaN or +inf, and 0.
    """
    found = torch.zeros(len(logits), 4, dtype=torch.int32, device=logits.device)
    if logits.shape[1]:
        highest = logits.amax(dim=-1)
        score, column = gumbel(*noise).mul_(temperature).add_(logits).max(dim=-1)
        found[:, 0] = score.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
        found[:, 1] = column + first
        found[:, 2] = highest.isnan() | highest.isposinf()
    else:
        found[:, 0] = torch.full((len(logits),), -torch.inf).view(torch.int32)
    return found


def choose(found: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best candidate of each row. Returns ids [rows] int64, and whether each row is finite, [rows] bool.

    found: int32 [rows, parts, 4], candidates from all parts of the vocabulary, in the order of the token ids.
    """
    scores, best = found[:, :, 0].contiguous().view(torch.float32).max(dim=-1)  # the first among equals
    token_ids = found[:, :, 1].gather(1, best[:, None]).squeeze(1).long()
    return token_ids, (found[:, :, 2] == 0).all(dim=-1) & (scores > -torch.inf)


def draw_filtered(
    logits: Tensor, noise: Noise, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """Draw from the tokens that top_k, top_p and min_p keep.

    top_p keeps the fewest of the top_k tokens that hold the share top_p of their probability.

    Args:
        top_k: int32. The size of the vocabulary turns it off.
        top_p: Values above 1 turn it off.
        log_min_p: -inf turns it off.
        width: At least the largest top_k of the rows.

    Returns:
        Ids [rows] int64.
    """
    floor = lowest_kept(logits, temperature, top_k, top_p, log_min_p, width)
    return gumbel(*noise).mul_(temperature).add_(_keep(logits, floor)).argmax(dim=-1)


def lowest_kept(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """Return the lowest logit that all three filters of `draw_filtered` keep, [rows, 1] float32."""
    largest = _largest(logits, width)  # [rows, width], descending
    likeliest = largest[:, :1]
    weights = ((largest - likeliest) / temperature).exp_()
    # Sum in float64, because the order of summation depends on device and batch and must not change the result.
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    last_k = (top_k.long() - 1).clamp_(min=0)  # the padding row of a captured step has no parameters
    last_p = torch.searchsorted(running, top_p * running.gather(-1, last_k))  # the first token that reaches the share
    last = torch.minimum(last_k, last_p)
    return torch.maximum(largest.gather(-1, last), likeliest + temperature * log_min_p)


def _keep(logits: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(logits < floor, -torch.inf)


def _largest(logits: Tensor, width: int) -> Tensor:
    """Return the `width` largest values of each row, descending."""
    if logits.device.type == "cpu":  # numpy's vectorised sort is 30 times as fast as torch's
        ascending = np.sort(logits.numpy(), axis=-1)
        return torch.from_numpy(ascending[:, : -width - 1 : -1].copy())
    if width < logits.shape[-1]:
        return logits.topk(width).values
    return logits.sort(dim=-1, descending=True).values


@dataclass(slots=True)
class DrawLogprobs:
    """Log-probabilities of each draw and its likeliest tokens, descending. Zeros if the row requested none."""

    sampled: Tensor  # [draws] float32
    top_ids: Tensor  # [draws, k] int64
    top: Tensor  # [draws, k] float32


def raw_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return all log-probabilities [n, vocab] in a new tensor, and the ids and values of the k largest [n, k].

    It always searches for MAX_LOGPROBS tokens. So the choice among equal tokens does not depend on other rows.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if k == 0:
        none = logprobs[:, :0]
        return logprobs, none.long(), none
    top, top_ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=-1)
    return logprobs, top_ids[:, :k], top[:, :k]

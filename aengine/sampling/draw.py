"""Draws in torch, greedy, from all tokens, or from the likeliest ones; and log-probabilities.

A CPU draws with these functions. On CUDA they are the reference for the kernels of `fused`. They are pure functions of
tensors: logits [rows, vocab] float32, and parameters [rows, 1]. Rows do not affect each other, and shapes are fixed.
There is no host sync: the host knows which function a row needs.

A draw is the argmax of logits + temperature * noise. This equals that of logits / temperature + noise, but does not
overflow at a tiny temperature. A filter is the lowest logit to keep. Tokens as likely as the last one kept are kept as
well, so the order of equals does not matter.

Log-probabilities are of the raw distribution: before bias, penalties, masks and temperature.
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
    """The inputs of the noise of some rows: token codes [vocab], keys [rows, 1], all int32."""

    codes: Tensor
    key0: Tensor
    key1: Tensor


def draw_greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token, the lowest id among equals: [rows] int64."""
    return logits.argmax(dim=-1)


def draw_plain(logits: Tensor, noise: Noise, temperature: Tensor, log_min_p: Tensor | None) -> Tensor:
    """Draw from the softmax of logits / temperature, without tokens below min_p of its maximum: [rows] int64.

    log_min_p is -inf for rows without min_p, None if no row has it.
    """
    if log_min_p is not None:
        logits = _keep(logits, logits.amax(dim=-1, keepdim=True) + temperature * log_min_p)
    return gumbel(*noise).mul_(temperature).add_(logits).argmax(dim=-1)


def candidates(logits: Tensor, noise: Noise, temperature: Tensor, first: int) -> Tensor:
    """Return what `draw_plain` draws from the tokens from `first` on, as candidates for `choose`, int32 [rows, 4].

    A candidate is the bits of the float32 score, the token, 1 if a logit is NaN or +inf, and 0. logits [rows, n] and
    the codes of the noise [n] are for these tokens.
    """
    found = torch.zeros(len(logits), 4, dtype=torch.int32, device=logits.device)
    if logits.shape[1]:
        highest = logits.amax(dim=-1)
        score, place = gumbel(*noise).mul_(temperature).add_(logits).max(dim=-1)
        found[:, 0] = score.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
        found[:, 1] = place + first
        found[:, 2] = highest.isnan() | highest.isposinf()
    else:
        found[:, 0] = torch.full((len(logits),), -torch.inf).view(torch.int32)
    return found


def choose(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids [rows] int64, and whether each row is finite, [rows] bool, given candidates of all parts of the
    tokens.

    found: int32 [rows, parts, 4], in the order of the tokens.
    """
    scores, place = found[:, :, 0].contiguous().view(torch.float32).max(dim=-1)  # the first among equals
    token_ids = found[:, :, 1].gather(1, place[:, None]).squeeze(1).long()
    return token_ids, (found[:, :, 2] == 0).all(dim=-1) & (scores > -torch.inf)


def draw_filtered(
    logits: Tensor, noise: Noise, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """Draw from the fewest of the top_k likeliest tokens that hold top_p of their probability, without those below
    min_p.

    Args:
        top_k: int32. Off at the size of the vocabulary.
        top_p: Off above 1.
        log_min_p: Off at -inf.
        width: The most tokens that any row keeps, equals aside: the vocabulary, or the largest top_k if all have one.

    Returns:
        Ids [rows] int64.
    """
    floor = lowest_kept(logits, temperature, top_k, top_p, log_min_p, width)
    return gumbel(*noise).mul_(temperature).add_(_keep(logits, floor)).argmax(dim=-1)


def lowest_kept(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """Return the lowest logit that passes all three filters of `draw_filtered`, [rows, 1] float32."""
    largest = _largest(logits, width)  # [rows, width], descending
    likeliest = largest[:, :1]
    weights = ((largest - likeliest) / temperature).exp_()
    # In float64, so that the order of summation, which depends on device and batch, does not change the result.
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    last_k = top_k.long() - 1
    last_p = torch.searchsorted(running, top_p * running.gather(-1, last_k))  # the first to reach the share
    last = torch.minimum(last_k, last_p)
    return torch.maximum(largest.gather(-1, last), likeliest + temperature * log_min_p)


def _keep(logits: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(logits < floor, -torch.inf)


def _largest(logits: Tensor, width: int) -> Tensor:
    """Return the `width` largest values of each row, descending."""
    if logits.device.type == "cpu":  # numpy's sort of floats is vectorised: 30 times as fast as torch's
        ascending = np.sort(logits.numpy(), axis=-1)
        return torch.from_numpy(ascending[:, : -width - 1 : -1].copy())
    if width < logits.shape[-1]:
        return logits.topk(width).values
    return logits.sort(dim=-1, descending=True).values


@dataclass(slots=True)
class DrawLogprobs:
    """Log-probabilities of each draw, likeliest candidates first; zeros for draws whose row did not request any."""

    sampled: Tensor  # [draws] float32
    top_ids: Tensor  # [draws, k] int64
    top: Tensor  # [draws, k] float32


def raw_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return all log-probabilities [n, vocab], a new tensor, and the ids and values of the k largest [n, k].

    It always searches for the most that a request may want. So which of several equal tokens are returned does not
    depend on other rows.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    if k == 0:
        none = logprobs[:, :0]
        return logprobs, none.long(), none
    top, top_ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[1]), dim=-1)
    return logprobs, top_ids[:, :k], top[:, :k]

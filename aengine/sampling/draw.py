"""The three ways to draw: the likeliest token, from everything, and from the likeliest few.

Each is a pure function of tensors of fixed shapes (logits [rows, vocab] float32, everything per row [rows, 1]),
treats every row by itself and reads nothing back. Which one a row needs is known on the host. A CPU draws with them;
on CUDA they say what the kernels of `fused` have to draw.

A draw is the argmax of logits + temperature * noise, which is that of logits / temperature + noise without the
overflow that a tiny temperature would bring. A filter is a lowest logit to keep; all tokens as likely as the last
one kept are kept too, so that the order of equals never matters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.noise import gumbel


class Noise(NamedTuple):
    """The inputs of some rows' noise: token codes [vocab], keys [rows, 1], all int32."""

    codes: Tensor
    key0: Tensor
    key1: Tensor


def draw_greedy(logits: Tensor) -> Tensor:
    """The likeliest token, the lowest id among equals: [rows] int64."""
    return logits.argmax(dim=-1)


def draw_plain(logits: Tensor, noise: Noise, temperature: Tensor, log_min_p: Tensor | None) -> Tensor:
    """Draw from the softmax of logits / temperature, cut at min_p of its maximum: [rows] int64.

    log_min_p is -inf for rows without that cut, None if no row has it.
    """
    if log_min_p is not None:
        logits = _keep(logits, logits.amax(dim=-1, keepdim=True) + temperature * log_min_p)
    return gumbel(*noise).mul_(temperature).add_(logits).argmax(dim=-1)


def candidates(logits: Tensor, noise: Noise, temperature: Tensor, first: int) -> Tensor:
    """What `draw_plain` finds among some of the tokens, from `first` on: int32 [rows, 4], each row's best score as the
    bits of a float32, its token, and 1 where something is NaN or +inf.

    The codes of the noise are those tokens'; logits [rows, so many of them].
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
    """The best of the candidates of several parts of the tokens, by their order: int32 [rows, parts, 4] -> ids [rows]
    int64, and whether each row was finite [rows] bool.
    """
    scores, place = found[:, :, 0].contiguous().view(torch.float32).max(dim=-1)  # the first among equals
    token_ids = found[:, :, 1].gather(1, place[:, None]).squeeze(1).long()
    return token_ids, (found[:, :, 2] == 0).all(dim=-1) & (scores > -torch.inf)


def draw_filtered(
    logits: Tensor, noise: Noise, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """Draw from the top_k likeliest tokens, of these the fewest that hold top_p of the probability, cut at min_p.

    top_k int32, vocab where it is off; top_p above 1 where it is off. No row keeps more than its `width` likeliest
    tokens (and their equals): the vocabulary, or the largest top_k if all rows have one. [rows] int64.
    """
    floor = lowest_kept(logits, temperature, top_k, top_p, log_min_p, width)
    return gumbel(*noise).mul_(temperature).add_(_keep(logits, floor)).argmax(dim=-1)


def lowest_kept(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor, width: int
) -> Tensor:
    """The logit [rows, 1] float32 of the last token that passes all three filters of `draw_filtered`."""
    largest = _largest(logits, width)  # [rows, width], descending
    likeliest = largest[:, :1]
    weights = ((largest - likeliest) / temperature).exp_()
    # In float64, so that the order of summation, which depends on the device and on the batch, does not show.
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    last_k = top_k.long() - 1
    last_p = torch.searchsorted(running, top_p * running.gather(-1, last_k))  # the first to reach the share
    last = torch.minimum(last_k, last_p)
    return torch.maximum(largest.gather(-1, last), likeliest + temperature * log_min_p)


def _keep(logits: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(logits < floor, -torch.inf)


def _largest(logits: Tensor, width: int) -> Tensor:
    """The `width` largest values of each row, descending."""
    if logits.device.type == "cpu":  # numpy's sort of floats is vectorised: 30 times as fast as torch's
        ascending = np.sort(logits.numpy(), axis=-1)
        return torch.from_numpy(ascending[:, : -width - 1 : -1].copy())
    if width < logits.shape[-1]:
        return logits.topk(width).values
    return logits.sort(dim=-1, descending=True).values

"""The definition of the sampler: one row at a time, in float64 numpy, without any code of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.requests.sampling_params import SamplingParams

Floats = NDArray[np.float64]
M32 = 0xFFFFFFFF


def mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & M32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & M32
    return x ^ x >> 16


def hash32(seed: int, position: int, token_id: int) -> int:
    low, high = seed & M32, seed >> 32 & M32
    key0 = mix(mix(mix(low + 0x9E3779B9 & M32) + high & M32) + position & M32)
    key1 = mix(mix(mix(high + 0x7F4A7C15 & M32) + low & M32) + position & M32)
    x = (token_id * 0x9E3779B1 & M32) ^ key0
    x ^= x >> 16
    x = x * 0x85EBCA6B & M32
    x ^= key1
    x ^= x >> 15
    x = x * 0xC2B2AE35 & M32
    return x ^ x >> 16


def gumbel(seed: int, position: int, vocab_size: int) -> Floats:
    hashes = np.array([hash32(seed, position, i) >> 9 for i in range(vocab_size)], dtype=np.float64)
    return -np.log(-np.log((hashes + 0.5) / 2**23))


@dataclass
class Reference:
    token_id: int
    kept: NDArray[np.bool_]  # the tokens that top_k, top_p and min_p keep
    logits: Floats  # processed, before temperature
    logprobs: Floats  # raw
    clear: bool  # False: a decision is so close that float32 may decide differently


CLOSE = 1e-4


def sample(
    logits: Sequence[float],
    params: SamplingParams,
    seed: int,
    position: int,
    prompt: Sequence[int],
    output: Sequence[int],
    stop_ids: Sequence[int],
) -> Reference:
    raw = np.array(logits, dtype=np.float64)
    top = raw.max()
    logprobs = raw - top - math.log(np.exp(raw - top).sum())

    x = raw.copy()
    for token_id, bias in params.logit_bias.items():
        x[token_id] += bias
    for token_id in {*prompt, *output}:
        x[token_id] *= params.repetition_penalty if x[token_id] < 0 else 1 / params.repetition_penalty
    for token_id in set(output):
        x[token_id] -= params.presence_penalty + params.frequency_penalty * list(output).count(token_id)
    if position - len(prompt) < params.min_tokens:
        x[list(stop_ids)] = -np.inf

    if params.temperature == 0 or params.top_k == 1:
        ranked = np.sort(x)[::-1]
        clear = len(x) == 1 or not 0 < ranked[0] - ranked[1] < CLOSE
        return Reference(int(x.argmax()), np.ones(len(x), dtype=bool), x, logprobs, clear)

    t = params.temperature
    scaled = x / t
    kept = np.ones(len(x), dtype=bool)
    margins = [np.inf]  # the margin of each decision, in logits or in probability
    ranked = np.sort(scaled)[::-1]
    if 0 < params.top_k < len(x):
        kth, next_one = ranked[params.top_k - 1 : params.top_k + 1]
        kept &= scaled >= kth  # equals of the last one are kept too
        if kth != next_one:
            margins.append((kth - next_one) * t)
        ranked = ranked[: params.top_k]
    if params.top_p < 1:
        weights = np.exp(ranked - ranked[0])
        shares = np.cumsum(weights) / weights.sum()
        last = min(int((shares < params.top_p).sum()), len(shares) - 1)
        kept &= scaled >= ranked[last]
        margins.extend(abs(shares[max(last - 1, 0) : last + 2] - params.top_p))
        if last + 1 < len(ranked) and ranked[last] != ranked[last + 1]:
            margins.append((ranked[last] - ranked[last + 1]) * t)
    if params.min_p > 0:
        below = scaled - scaled.max()
        kept &= below >= math.log(params.min_p)
        margins.extend(abs(below - math.log(params.min_p))[below < 0] * t)

    scores = np.where(kept, scaled + gumbel(seed, position, len(x)), -np.inf)
    best = np.sort(scores)[::-1][:2]
    if len(best) == 2 and np.isfinite(best[1]):
        margins.append((best[0] - best[1]) * t)
    return Reference(int(scores.argmax()), kept, x, logprobs, min(margins) > CLOSE)

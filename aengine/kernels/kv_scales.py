"""Keys and values in an FP8 cache are codes: numbers that a scale of the layer turns back into values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of its numbers; it has NaN, and no infinity


@dataclass(frozen=True, slots=True)
class KVScales:
    """value = code * scale, for all keys and for all values of a layer. A cache of another dtype holds values."""

    key: float = 1.0
    value: float = 1.0


NO_SCALES = KVScales()


def encode(x: Tensor, scale: float) -> Tensor:
    """x [...], floats -> codes of the same shape. What is too large becomes the largest; what is not finite, NaN.

    So that is still seen where the codes are read.
    """
    codes = (x.float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST)  # of NaN, NaN
    return codes.masked_fill_(x.isinf(), float("nan")).to(FP8)


def as_bytes(cache: Tensor) -> Tensor:
    """The same memory for copies by index, for which torch knows no FP8; any other dtype as it is."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache

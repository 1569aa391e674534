"""Keys and values in an FP8 cache are codes: a value is its code times a scale of the layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # FP8 number; FP8 has NaN, but no infinity


@dataclass(frozen=True, slots=True)
class KVScales:
    """The scales of all keys and of all values of a layer. A cache of another dtype needs none."""

    key: float = 1.0
    value: float = 1.0


NO_SCALES = KVScales()


def encode(x: Tensor, scale: float) -> Tensor:
    """Return FP8 codes of floats, in the same shape.

    Numbers that are too large become the largest code. NaN and infinities become NaN, so that readers still see them.
    """
    codes = (x.float() * (1.0 / scale)).clamp_(-LARGEST, LARGEST)  # NaN stays NaN
    return codes.masked_fill_(x.isinf(), float("nan")).to(FP8)


def as_bytes(cache: Tensor) -> Tensor:
    """View an FP8 cache as bytes, because torch cannot copy FP8 by index. Other caches are returned as they are."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache

"""Turns pooled numbers into embeddings, similarities and probabilities, in float64."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_NORM = 1e-12  # as in torch's normalize; a zero vector stays zero


def vector_of(chunks: Sequence[array[float]], tokens: int, mean: bool) -> NDArray[np.float64]:
    """Return the vector [hidden] of a prompt: the sum over its chunks, divided by its tokens for a mean."""
    total = np.sum([np.asarray(chunk, dtype=np.float64) for chunk in chunks], axis=0)
    vector: NDArray[np.float64] = total / tokens if mean else total
    return vector


def embedding_of(vector: NDArray[np.float64], dimensions: int | None, normalize: bool) -> array[float]:
    """Return the first `dimensions` numbers, or all for None, scaled to length 1 if `normalize` is set."""
    vector = vector[:dimensions]
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
    return array("f", vector.astype(np.float32).tobytes())


def cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return the cosine of the angle between two vectors."""
    lengths = max(float(np.linalg.norm(one)), _LEAST_NORM) * max(float(np.linalg.norm(other)), _LEAST_NORM)
    return float(one @ other) / lengths


def probabilities(logits: Sequence[float], independent: bool) -> tuple[float, ...]:
    """Return the probability of each class. Unless classes are independent, they add up to 1."""
    values = np.asarray(logits, dtype=np.float64)
    if independent:
        found = np.exp(-np.logaddexp(0.0, -values))
    else:
        shifted = np.exp(values - values.max())
        found = shifted / shifted.sum()
    return tuple(found.tolist())

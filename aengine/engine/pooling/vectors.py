"""From what was taken of prompts to embeddings, similarities and probabilities, in float64."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_LEAST_NORM = 1e-12  # as torch's normalize has it: a vector of zeros stays one


def vector_of(chunks: Sequence[array[float]], tokens: int, mean: bool) -> NDArray[np.float64]:
    """[hidden] of a prompt: the sum over its chunks, for a mean divided by its tokens."""
    total = np.sum([np.asarray(chunk, dtype=np.float64) for chunk in chunks], axis=0)
    vector: NDArray[np.float64] = total / tokens if mean else total
    return vector


def embedding_of(vector: NDArray[np.float64], dimensions: int | None, normalize: bool) -> array[float]:
    """The first `dimensions` numbers (None: all), of length 1 where they are to be normalised."""
    vector = vector[:dimensions]
    if normalize:
        vector = vector / max(float(np.linalg.norm(vector)), _LEAST_NORM)
    return array("f", vector.astype(np.float32).tobytes())


def cosine(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The cosine of the angle between two vectors."""
    lengths = max(float(np.linalg.norm(one)), _LEAST_NORM) * max(float(np.linalg.norm(other)), _LEAST_NORM)
    return float(one @ other) / lengths


def probabilities(logits: Sequence[float], independent: bool) -> tuple[float, ...]:
    """Each class by itself where they are independent, else all of them together, which add up to 1."""
    values = np.asarray(logits, dtype=np.float64)
    if independent:
        found = np.exp(-np.logaddexp(0.0, -values))
    else:
        shifted = np.exp(values - values.max())
        found = shifted / shifted.sum()
    return tuple(found.tolist())

"""Positions of the tokens of a prompt with images, for models that rotate by time, row and column."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.model.images.resizing import ImagePlan


def grid_positions(pieces: Sequence[int | ImagePlan]) -> tuple[NDArray[np.int64], int]:
    """Return the positions of all tokens of a prompt, and how far the positions after it are shifted.

    The token that follows the prompt at index n has n + shift as each of its three positions, and so on.

    Args:
        pieces: The prompt in order: a number of tokens of text, or an image.

    Returns: [3, tokens] with time, row and column, and the shift, which is at most 0.
    """
    parts: list[NDArray[np.int64]] = []
    start = tokens = 0
    for piece in pieces:
        if isinstance(piece, int):
            parts.append(np.broadcast_to(np.arange(start, start + piece, dtype=np.int64), (3, piece)))
            start, tokens = start + piece, tokens + piece
        else:
            parts.append(start + _grid(piece))
            start, tokens = start + max(piece.rows, piece.columns), tokens + piece.tokens
    whole = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), dtype=np.int64)
    return whole, start - tokens


def _grid(plan: ImagePlan) -> NDArray[np.int64]:
    """Return time, row and column of an image's tokens, from the image's start: [3, tokens]."""
    rows, columns = np.divmod(np.arange(plan.tokens, dtype=np.int64), plan.columns)
    return np.stack((np.zeros_like(rows), rows, columns))

"""Positions of the tokens of a prompt with images, for models that rotate by time, row and column."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aengine.model.images.resizing import ImagePlan


def grid_positions(
    pieces: Sequence[int | ImagePlan], first: int = 0, last: int = sys.maxsize
) -> tuple[NDArray[np.int64], int]:
    """Return the positions of tokens of a prompt, and how far the positions after it are shifted.

    The token that follows the prompt at index n has n + shift as each of its three positions, and so on.

    Args:
        pieces: The prompt in order: a number of tokens of text, or an image.
        first: The index of the first token whose positions are returned.
        last: The index after the last one. The prompt may end before it.

    Returns: [3, tokens] with time, row and column, and the shift, which is at most 0.
    """
    parts: list[NDArray[np.int64]] = []
    start = tokens = 0  # the position and the index of a piece's first token
    for piece in pieces:
        count = piece if isinstance(piece, int) else piece.tokens
        index = np.arange(max(first - tokens, 0), min(last - tokens, count), dtype=np.int64)
        if len(index):
            parts.append(start + _within(piece, index))
        start += piece if isinstance(piece, int) else max(piece.rows, piece.columns)
        tokens += count
    whole = np.concatenate(parts, axis=1) if parts else np.empty((3, 0), dtype=np.int64)
    return whole, start - tokens


def _within(piece: int | ImagePlan, index: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return time, row and column of some tokens of a piece, from the piece's start: [3, n]. index: [n]."""
    if isinstance(piece, int):
        return np.broadcast_to(index, (3, len(index)))
    rows, columns = np.divmod(index, piece.columns)
    return np.stack((np.zeros_like(rows), rows, columns))

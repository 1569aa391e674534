"""N-gram drafts of one row in plain Python, and histories for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

GARBAGE = 3  # fills histories beyond the rows' lengths; the texts contain it too


def expected_drafts(known: list[int], longest: int, shortest: int, drafts: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for start in reversed(range(len(known) - size)):
            if known[start : start + size] == known[-size:]:
                text = list(known)
                for place in range(start + size, start + size + drafts):
                    text.append(text[place])
                return text[len(known) :]
    return [-1] * drafts


@dataclass(frozen=True)
class Example:
    known: list[int]
    longest: int
    shortest: int
    drafts: list[int]


EXAMPLES = {
    "text that is repeated": Example([1, 2, 3, 4, 5, 9, 2, 3], 3, 1, [4, 5, 9, 2]),
    "no token occurs twice": Example([1, 2, 3, 4, 5], 3, 1, [-1, -1, -1]),
    "only the shortest occurs": Example([7, 4, 5, 8, 4], 3, 1, [5, 8, 4]),
    "what occurs is too short": Example([7, 4, 5, 8, 4], 3, 2, [-1, -1, -1]),
    "the longest goes before the latest": Example([1, 2, 3, 8, 7, 3, 9, 2, 3], 4, 1, [8, 7, 3]),
    "no longer than the longest": Example([1, 2, 3, 8, 7, 2, 3, 9, 1, 2, 3], 2, 1, [9, 1, 2]),
    "the same after a shorter one": Example([1, 2, 3, 8, 7, 2, 3, 9, 3, 1, 2, 3], 2, 1, [9, 3, 1]),
    "the latest of equals": Example([1, 2, 6, 1, 2, 7, 1, 2], 2, 1, [7, 1, 2]),
    "periodic text": Example([5, 6, 7, 5, 6, 7, 5], 3, 2, [6, 7, 5, 6, 7, 5, 6]),
    "equal tokens": Example([4, 4, 4, 4], 3, 1, [4, 4, 4, 4, 4]),
    "the n-gram starts the text": Example([1, 2, 9, 1, 2], 2, 2, [9, 1, 2, 9]),
    "the n-gram overlaps itself": Example([8, 8, 8], 2, 2, [8, 8]),
    "nothing is known": Example([], 3, 1, [-1, -1]),
    "one token": Example([3], 3, 1, [-1, -1]),
    "as long as the shortest": Example([3, 3], 3, 2, [-1, -1]),
}


@st.composite
def texts(draw: st.DrawFn) -> list[int]:
    """Short texts of few different tokens, with parts that recur."""
    parts = draw(st.lists(st.lists(st.integers(0, 3), max_size=9), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(parts) - 1), max_size=8))
    return [token for part in order for token in parts[part]]


def histories(texts: Sequence[list[int]], capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a history and lengths, with one row for each text."""
    history = torch.full((len(texts), capacity), GARBAGE, dtype=torch.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return history.to(device), torch.tensor([len(text) for text in texts], device=device)

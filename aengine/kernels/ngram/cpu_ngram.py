"""The reference implementation of `NgramKernels`, for a CPU. A row takes a few calls of numpy, which are fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aengine.kernels.ngram.base import check_sizes

Integers = npt.NDArray[np.signedinteger[Any]]


def match(history: Tensor, lengths: Tensor, rows: Tensor, longest: int, shortest: int, drafts: int) -> Tensor:
    check_sizes(longest, shortest, drafts)
    tokens: Integers = history.numpy()
    known_tokens: Integers = lengths.numpy()
    out = torch.full((len(rows), drafts), -1)
    for row, drafted in zip(rows.tolist(), out.numpy(), strict=True):
        followers = _followers(tokens[row, : known_tokens[row]], longest, shortest)
        if len(followers):
            drafted[:] = followers[np.arange(drafts) % len(followers)]
    return out


def _followers(known: Integers, longest: int, shortest: int) -> Integers:
    """Return all tokens after the earlier occurrence that match() uses; none if there is no occurrence."""
    newest = len(known) - 1
    (ends,) = (known[:-1] == known[-1:]).nonzero()  # the indices at which `matched` tokens of the n-gram end
    if not len(ends):
        return known[:0]
    latest = int(ends[-1])
    if latest + 1 >= longest and known[latest + 1 - longest : latest + 1].tobytes() == known[-longest:].tobytes():
        return known[latest + 1 :]  # found at once in text that repeats, where the loop would keep most indices
    matched = 1
    while matched < longest:
        longer = ends[1:] if ends[0] < matched else ends  # before the first there may be no further token
        longer = longer[known[longer - matched] == known[newest - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return known[ends[-1] + 1 :] if matched >= shortest else known[:0]


def append(history: Tensor, lengths: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
    written: Integers = history.numpy()
    new: Integers = tokens.numpy()
    capacity = history.shape[1]
    known_tokens: Integers = lengths.numpy()
    for row, count, drawn in zip(rows.tolist(), counts.tolist(), new, strict=True):
        start = int(known_tokens[row])
        end = min(start + count, capacity)
        if start < end:
            written[row, start:end] = drawn[: end - start]

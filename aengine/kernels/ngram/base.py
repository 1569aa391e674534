"""The operations that n-gram drafts need on a device.

`history` has the known tokens of each row, the prompt and then the output. An n-gram is a row's last tokens. It occurs
earlier if the same tokens end before the row's last token; both may overlap. The drafts are the tokens that followed.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class NgramKernels(Protocol):
    """The modules `cpu_ngram` and `triton_ngram` implement it.

    Every operation only enqueues work. It needs no host sync, and no shape depends on a tensor's values. So a step can
    be captured into a CUDA graph. The tensors are contiguous.
    """

    def match(self, history: Tensor, lengths: Tensor, rows: Tensor, longest: int, shortest: int, drafts: int) -> Tensor:
        """Return drafts of rows, [n, drafts] int64. If no n-gram of a row occurs earlier, its drafts are all -1.

        The longest n-gram that occurs earlier is used, and its latest earlier occurrence. If fewer tokens followed it
        than there are drafts, the drafts repeat them in a cycle.

        Args:
            history: [all rows, capacity] int32. Tokens from a row's length on may be anything.
            lengths: [all rows] int64, the known tokens of each row. More than the capacity counts as the capacity.
            rows: [n] int64; may contain a row twice.
            longest, shortest: the lengths of n-grams.

        Raises ValueError if `longest`, `shortest` or `drafts` is out of range.
        """
        ...

    def append(self, history: Tensor, lengths: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Write new tokens of rows into `history`. The lengths do not change. Tokens beyond the capacity are dropped.

        Args:
            history: [all rows, capacity] int32.
            lengths: [all rows] int64, the known tokens of each row without the new ones.
            rows: [n] int64. Contains no row twice, except a row whose tokens are never used.
            tokens: [n, width] int64.
            counts: [n] int64, from 0 to width: only that many of a row's tokens are written.
        """
        ...


def check_sizes(longest: int, shortest: int, drafts: int) -> None:
    """Raise ValueError if match() cannot take these arguments."""
    if shortest < 1:
        raise ValueError(f"shortest: {shortest} tokens; an n-gram has at least 1")
    if longest < shortest:
        raise ValueError(f"longest: {longest} tokens; use at least `shortest`, which is {shortest}")
    if drafts < 1:
        raise ValueError(f"drafts: {drafts}; use at least 1")

"""The attention over shared pages, as one kernel hands it to another."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPart:
    """The attention of each row over the pages that it shares with other rows, from `prefix_attention`.

    The softmax is not complete: it has parts, which `PagedDecode` merges.
    """

    starts: Tensor  # [rows] int32: how many leading positions of the row it covers; 0: none
    out: Tensor  # [parts, rows, heads, dim] float32: the weighted mean of each part's values
    lse: Tensor  # [parts, rows, heads] float32: log2 of each part's weight

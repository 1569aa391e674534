"""Reads results that a kernel has written to host memory. So no copy to the host delays the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

TURNS = 4  # steps whose results are kept; two can be in flight


class Written(Protocol):
    """The results of one step in host memory."""

    def read(self) -> tuple[list[int], list[bool], list[int]]:
        """Return the tokens of all rows, whether each row's logits were finite, and each row's number of tokens.

        If they were not finite, the row's tokens are meaningless. An empty list of numbers means one token a row.
        """
        ...


@dataclass(slots=True)
class WrittenVerdicts:
    """The tokens that rows keep after one step. Read them before `TURNS` more steps."""

    cells: Tensor  # [rows, at least 2 + the most drafts] int64, in pinned memory, as `DecodeKernels.end` writes them
    drafts: Sequence[int]  # of each row; empty: no row has any

    def read(self) -> tuple[list[int], list[bool], list[int]]:
        cells = self.cells.numpy()
        last = cells[:, -1]
        finite = (last >= 0).tolist()
        if not self.drafts:
            return cells[:, 0].tolist(), finite, []
        counts = 1 + np.array(self.drafts, dtype=np.int64) - np.maximum(last, ~last)
        kept = np.arange(cells.shape[1]) < counts[:, None]
        return cells[kept].tolist(), finite, counts.tolist()

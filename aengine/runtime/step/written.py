"""Draws that a kernel writes to host memory, so that no copy delays the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TURNS = 4  # results kept for each row; two steps can be in flight


@dataclass(slots=True)
class WrittenDraws:
    """The draws of one step. Read them after `end_decode` and before a row has drawn `TURNS` more times."""

    cells: Tensor  # [rows, TURNS] int64, in pinned memory
    places: Sequence[int]  # row * TURNS + turn, in the order of the step

    def read(self) -> tuple[list[int], list[bool]]:
        """Return each row's token, and whether its logits were finite. The token is meaningless if they were not."""
        drawn = self.cells.numpy().take(self.places)
        return np.maximum(drawn, ~drawn).tolist(), (drawn >= 0).tolist()

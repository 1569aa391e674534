"""Reads draws that a kernel has written to host memory. So no copy to the host delays the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TURNS = 4  # results kept for each row; two steps can be in flight


@dataclass(slots=True)
class WrittenDraws:
    """The draws of one step. Read them after `end_decode` and before a row has drawn `TURNS` more times."""

    cells: Tensor  # [rows, TURNS] int64, in pinned memory; ~token if the logits were not finite
    indices: Sequence[int]  # row * TURNS + turn, for each row of the step

    def read(self) -> tuple[list[int], list[bool]]:
        """Return each row's token, and whether its logits were finite. If they were not, the token is meaningless."""
        drawn = self.cells.numpy().take(self.indices)
        return np.maximum(drawn, ~drawn).tolist(), (drawn >= 0).tolist()

"""Draws that a kernel has written into the host's memory by itself, so that no copy stands between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

TURNS = 4  # results that are kept; two steps can be in flight


@dataclass(slots=True)
class WrittenDraws:
    """What `end_decode` has left of one step, to be read once that is done and before the row's next `TURNS` draws."""

    cells: Tensor  # [rows, TURNS] int64, in pinned memory
    places: Sequence[int]  # row * TURNS + turn, in the order of the step

    def read(self) -> tuple[list[int], list[bool]]:
        """The token that each row drew, without meaning where not finite, and whether it was finite."""
        drawn = self.cells.numpy().take(self.places)
        return np.maximum(drawn, ~drawn).tolist(), (drawn >= 0).tolist()

"""Scratch memory of products that several programs have a part in: their sums, and how many have arrived."""

from __future__ import annotations

import torch
from torch import Tensor


class Parts:
    """One stream at a time: launches share the memory. What a graph has captured stays where it is."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
        """float32 [sums] of any contents, and int32 [counters], zero as every kernel leaves them again."""
        key = (sums, counters)
        if key not in self._made:
            self._made[key] = (
                torch.empty(sums, dtype=torch.float32, device=device),
                torch.zeros(counters, dtype=torch.int32, device=device),
            )
        return self._made[key]

"""Scratch memory of products that several programs have a part in: their sums, and how many have arrived."""

from __future__ import annotations

import torch
from torch import Tensor


class Parts:
    """One stream at a time: launches share the memory. What a graph has captured stays where it is."""

    def __init__(self) -> None:
        self._sums: dict[tuple[torch.device, int], Tensor] = {}
        self._arrived: dict[tuple[torch.device, int], Tensor] = {}

    def __call__(self, device: torch.device, sums: int, counters: int) -> tuple[Tensor, Tensor]:
        """float32 [sums] of any contents, and int32 [counters], zero as every kernel leaves them again."""
        if (device, sums) not in self._sums:
            self._sums[device, sums] = torch.empty(sums, dtype=torch.float32, device=device)
        if (device, counters) not in self._arrived:
            self._arrived[device, counters] = torch.zeros(counters, dtype=torch.int32, device=device)
        return self._sums[device, sums], self._arrived[device, counters]

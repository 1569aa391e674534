"""Draws on CUDA: a floor under the tokens where there are filters, then one kernel for every kind of row."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.draw.cutoff import Cutoff
from aengine.kernels.draw.gumbel import Draw
from aengine.sampling.parameters import PickedParameters


class FusedDraw:
    """Both kernels of a draw with their scratch memory. One stream at a time."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._floors = Cutoff(max_rows, device)
        self._draw = Draw(max_rows, device)

    def __call__(
        self, logits: Tensor, picked: PickedParameters, positions: Tensor, filtered: bool
    ) -> tuple[Tensor, Tensor]:
        """Draw: ids [rows] int64 and whether each row was finite [rows] bool.

        logits [rows, vocab] float32, contiguous, only read; positions [rows] int64. filtered: whether any row may have
        top_k, top_p or min_p; else they are not looked at. Decides nothing on the host, and shapes are fixed.
        """
        temperature = picked.temperature[:, 0]
        floor = None
        if filtered:
            floor = self._floors(logits, temperature, picked.top_k[:, 0], picked.top_p[:, 0], picked.log_min_p[:, 0])
        return self._draw(logits, temperature, picked.seed_low[:, 0], picked.seed_high[:, 0], positions, floor)

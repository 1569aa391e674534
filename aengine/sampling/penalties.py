"""Repetition, presence and frequency penalties, and the token counts they need."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.parameters import PickedParameters
from aengine.sampling.upload import upload
from aengine.step_plan import NewRow


def penalize(logits: Tensor, cells: Tensor, picked: PickedParameters) -> Tensor:
    """Logits after the three penalties, [rows, vocab] float32.

    Repetition weakens every token of prompt and output (division if the logit is positive, else multiplication).
    Presence and frequency look at the output alone: subtracted once, and once per occurrence.
    cells [rows, vocab] int32, of `TokenCounts`.
    """
    weakened = torch.where(logits < 0, logits * picked.repetition, logits / picked.repetition)
    logits = torch.where(cells != 0, weakened, logits)
    return logits.sub_((cells >> 1) * picked.frequency).sub_((cells > 1) * picked.presence)


class TokenCounts:
    """For each row, how often each token is in its output and whether it is in its prompt.

    Both in one int32 cell: twice the one and once the other. Allocated when the first row needs it.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_rows, vocab_size)
        self._device = device
        self._table: Tensor | None = None

    def set_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Count the known tokens of these rows anew: the first prompt_len are the prompt, the rest is output."""
        if not new_rows:
            return
        rows = upload(np.array([new.row for new in new_rows], dtype=np.int64), self._device)
        self.cells.index_fill_(0, rows, 0)
        vocab_size = self._shape[1]
        prompts: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        outputs: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for new in new_rows:
            places = np.array(new.tokens, dtype=np.int64) + new.row * vocab_size
            prompts.append(places[: new.prompt_len])
            outputs.append(places[new.prompt_len :])
        self.cells.view(-1).index_fill_(0, upload(np.concatenate(prompts), self._device), 1)
        self._count(upload(np.concatenate(outputs), self._device))

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Give rows[i] what sources[i] has, both [n] int64."""
        self.cells.index_copy_(0, rows, self.cells.index_select(0, sources))

    def pick(self, rows: Tensor) -> Tensor:
        """The cells [n, vocab] int32 of rows [n] int64."""
        return self.cells.index_select(0, rows)

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Count one more output token for each of these rows, both [n] int64."""
        self._count(rows * self._shape[1] + token_ids)

    def _count(self, places: Tensor) -> None:
        self.cells.view(-1).index_add_(0, places, torch.full_like(places, 2, dtype=torch.int32))

    @property
    def cells(self) -> Tensor:
        """[rows, vocab] int32."""
        if self._table is None:
            self._table = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return self._table

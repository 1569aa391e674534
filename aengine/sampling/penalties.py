"""Repetition, presence and frequency penalties, and the token counts they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.parameters import ParameterColumns
from aengine.sampling.upload import upload
from aengine.step_plan import NewRow

FEW_ROWS = 32  # rows of the first allocation; rows are assigned from 0 on


def penalize(logits: Tensor, cells: Tensor, picked: ParameterColumns) -> Tensor:
    """Return logits after the three penalties, [rows, vocab] float32.

    Repetition weakens every token of prompt and output: it divides positive logits and multiplies negative ones.
    Presence is subtracted once for every token of the output, frequency once per occurrence. cells: [rows, vocab] int32
    of `TokenCounts`.
    """
    weakened = torch.where(logits < 0, logits * picked.repetition, logits / picked.repetition)
    logits = torch.where(cells != 0, weakened, logits)
    return logits.sub_((cells >> 1) * picked.frequency).sub_((cells > 1) * picked.presence)


class TokenCounts:
    """Counts each token in a row's output, and notes whether it is in the prompt.

    An int32 cell holds both: twice the count, plus one if the token is in the prompt. The table grows in two steps: for
    the first rows that need it, then for all rows. 256 rows of a large vocabulary take 200 MiB.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._table: Tensor | None = None

    def allocate(self, rows: Iterable[int]) -> None:
        """Allocate cells for these rows. Existing cells keep their contents."""
        needed = max(rows, default=-1) + 1
        old = self._table
        if needed == 0 or (old is not None and needed <= len(old)):
            return
        count = min(FEW_ROWS, self._max_rows) if needed <= FEW_ROWS else self._max_rows
        self._table = torch.zeros((count, self._vocab_size), dtype=torch.int32, device=self._device)
        if old is not None:
            self._table[: len(old)].copy_(old)

    def set_rows(self, new_rows: Sequence[NewRow]) -> None:
        """Replace the counts of the given rows by those of `tokens`: prompt_len prompt tokens, then the output."""
        if not new_rows:
            return
        self.allocate(new.row for new in new_rows)
        rows = upload(np.array([new.row for new in new_rows], dtype=np.int64), self._device)
        self.cells.index_fill_(0, rows, 0)
        vocab_size = self._vocab_size
        prompts: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        outputs: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for new in new_rows:
            indices = np.array(new.tokens, dtype=np.int64) + new.row * vocab_size
            prompts.append(indices[: new.prompt_len])
            outputs.append(indices[new.prompt_len :])
        self.cells.view(-1).index_fill_(0, upload(np.concatenate(prompts), self._device), 1)
        self._count(upload(np.concatenate(outputs), self._device))

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Copy the cells of sources to rows, both [n] int64. Cells for rows must be allocated."""
        self.cells.index_copy_(0, rows, self.cells.index_select(0, sources))

    def pick(self, rows: Tensor) -> Tensor:
        """Return the cells [n, vocab] int32 of rows [n] int64."""
        return self.cells.index_select(0, rows)

    def add(self, rows: Tensor, token_ids: Tensor, counted: Tensor | None = None) -> None:
        """Count one more output token for each given row, both [n] int64. counted: [n] bool, which; None: all."""
        self._count(rows * self._vocab_size + token_ids, counted)

    def _count(self, indices: Tensor, counted: Tensor | None = None) -> None:
        """Count output tokens. indices: [n] int64, into the flat table."""
        twos = torch.full_like(indices, 2, dtype=torch.int32)
        self.cells.view(-1).index_add_(0, indices, twos if counted is None else twos * counted)

    @property
    def cells(self) -> Tensor:
        """The cells of the allocated rows, [rows, vocab] int32."""
        if self._table is None:
            raise RuntimeError("no row has been counted")
        return self._table

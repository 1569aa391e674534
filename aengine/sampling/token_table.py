"""Logit offsets of a few token ids per row: logit_bias, and the tokens that min_tokens masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from aengine.sampling.upload import upload


class TokenTable:
    """Ids [rows, width] int64 and values [rows, width] float32, as wide as the longest entry so far.

    Shorter entries are filled up with id 0 and value 0, which change nothing. Rows never set hold nothing.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._ids = torch.zeros((max_rows, 0), dtype=torch.int64, device=device)
        self._values = torch.zeros((max_rows, 0), dtype=torch.float32, device=device)

    def set_rows(self, entries: Iterable[tuple[int, Mapping[int, float]]]) -> None:
        """Replace the entries of these rows: (row, {token id: value}). Ids that are no tokens are dropped."""
        kept = [
            (row, {token_id: value for token_id, value in entry.items() if 0 <= token_id < self._vocab_size})
            for row, entry in entries
        ]
        if not kept:
            return
        self._widen(max(len(entry) for _, entry in kept))
        ids = np.zeros((len(kept), self._ids.shape[1]), dtype=np.int64)
        values = np.zeros(ids.shape, dtype=np.float32)
        for i, (_, entry) in enumerate(kept):
            ids[i, : len(entry)] = list(entry.keys())
            values[i, : len(entry)] = list(entry.values())
        rows = upload(np.array([row for row, _ in kept], dtype=np.int64), self._device)
        self._ids.index_copy_(0, rows, upload(ids, self._device))
        self._values.index_copy_(0, rows, upload(values, self._device))

    def copy_rows(self, rows: Tensor, sources: Tensor) -> None:
        """Give rows[i] what sources[i] has, both [n] int64."""
        for table in (self._ids, self._values):
            table.index_copy_(0, rows, table.index_select(0, sources))

    def add_to(self, logits: Tensor, draws: Tensor, rows: Tensor, where: Tensor | None = None) -> None:
        """Add the values of rows[i] to logits[draws[i]] in place, only where `where` [n, 1] bool says so.

        logits [all draws, vocab], contiguous; draws and rows [n] int64.
        """
        values = self._values.index_select(0, rows)
        if where is not None:
            values.masked_fill_(~where, 0.0)
        cells = draws[:, None] * logits.shape[1] + self._ids.index_select(0, rows)
        logits.view(-1).index_add_(0, cells.view(-1), values.view(-1))

    def _widen(self, width: int) -> None:
        """Grow the table to entries of that length, doubling, so that it seldom happens."""
        missing = width - self._ids.shape[1]
        if missing > 0:
            missing = max(missing, self._ids.shape[1])
            self._ids = torch.nn.functional.pad(self._ids, (0, missing))
            self._values = torch.nn.functional.pad(self._values, (0, missing))

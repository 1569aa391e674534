"""The running batch on the device: one row of persistent tensors for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.types import NewRow


class Rows:
    """What the device remembers of each row between steps; the host sends only what changed.

    `lengths` also exists on the host: lengths advance by known amounts, so both sides agree without a copy.
    """

    def __init__(self, max_rows: int, pages_per_row: int, device: torch.device) -> None:
        self.device = device
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.length = torch.zeros(max_rows, dtype=torch.int64, device=device)  # tokens whose KV is written
        self.page_table = torch.zeros((max_rows, pages_per_row), dtype=torch.int32, device=device)
        self.lengths = [0] * max_rows

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Set the length and the pages of rows that change owner."""
        if not new_rows:
            return
        rows = torch.tensor([new.row for new in new_rows], device=self.device)
        self.length[rows] = torch.tensor([new.length for new in new_rows], device=self.device)
        width = max(len(new.pages) for new in new_rows)
        padded = [new.pages + [0] * (width - len(new.pages)) for new in new_rows]
        self.page_table[rows, :width] = torch.tensor(padded, dtype=torch.int32, device=self.device)
        for new in new_rows:
            self.lengths[new.row] = new.length

    def grow(self, new_pages: Sequence[tuple[int, int, int]]) -> None:
        """Append pages: (row, index in its page table, page)."""
        if not new_pages:
            return
        row, index, page = torch.tensor(new_pages, device=self.device).unbind(1)
        self.page_table[row, index] = page.to(torch.int32)

    def slots(self, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
        """Where each token's K and V go: page * page_size + offset, [tokens] int64. rows, positions: [tokens]."""
        pages = self.page_table[rows, positions // page_size].to(torch.int64)
        return pages * page_size + positions % page_size

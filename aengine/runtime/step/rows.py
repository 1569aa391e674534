"""The running batch on the device: each sequence owns one row of persistent tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from aengine.kernels.lora.base import NO_ADAPTER
from aengine.sampling.upload import upload
from aengine.step_plan import NewPage, NewRow, StepPlan


class Rows:
    """The state of all rows on the device. The host sends only changes.

    `lengths` is the host's copy of `length`. For decoding rows it may be an upper bound.
    """

    def __init__(
        self,
        max_rows: int,
        pages_per_row: int,
        device: torch.device,
        adapters: bool = False,
        windows: bool = False,
        near_shift: int = 0,
        most_drafts: int = 0,
        recurrent: bool = False,
        images: bool = False,
    ) -> None:
        """Make `max_rows` rows and the padding row. The padding row always has length 0 and only page 0.

        Args:
            adapters: Whether rows can have adapters.
            windows: Whether layers with a window have separate pages.
            near_shift: `Decoder.near_shift`.
            most_drafts: The most drafts of a row.
            recurrent: Whether the model has recurrent layers.
            images: Whether rows can have `NewRow.shift`.
        """
        self.device = device
        self.padding = max_rows
        self.count = max_rows = max_rows + 1
        # The next tokens of each row: the token that it drew last, and then its drafts. Any id may stand for a draft
        # that was not made: it is refused, unless it is the token that the row draws. The padding row's are 0.
        self.next_tokens = torch.zeros((1 + most_drafts, max_rows), dtype=torch.int64, device=device)
        self.last_token = self.next_tokens[0]
        self.most_drafts = most_drafts
        self.flat_tokens = self.next_tokens.view(-1)
        self.length = torch.zeros(max_rows, dtype=torch.int64, device=device)  # tokens whose KV is written
        # How many tokens the row's recurrent state contains. The tokens from there to `length` are accepted drafts.
        # None: the state always contains all tokens, or there is none.
        self.state_length = torch.zeros_like(self.length) if most_drafts and recurrent else None
        # The rows whose newest step verified drafts: their states may not contain the accepted ones yet.
        self._behind: set[int] = set()
        self.page_table = torch.zeros((max_rows, pages_per_row), dtype=torch.int32, device=device)
        self.window_table = torch.zeros_like(self.page_table) if windows else None
        self.lengths = [0] * max_rows
        self._near_shift = near_shift
        # What is added to the positions of each row, on the device and on the host. None: nothing is ever added.
        self._shifts = torch.zeros(max_rows, dtype=torch.int64, device=device) if near_shift or images else None
        self._host_shifts = [0] * max_rows
        # The adapter place of each row, on the device and on the host. The padding row has no adapter.
        self.adapter = torch.zeros(max_rows, dtype=torch.int32, device=device) if adapters else None
        self.adapters = [NO_ADAPTER] * max_rows
        self._adapted = 0  # rows with an adapter; ended rows count until they are reused

    def upload(self, values: Sequence[int]) -> Tensor:
        """Return integers as [n] int64 on the device, without a host sync."""
        return upload(np.array(values, dtype=np.int64), self.device)

    def admit(self, new_rows: Sequence[NewRow]) -> None:
        """Set the length, pages and adapter of rows that get a new sequence."""
        own = [new for new in new_rows if new.copy_of is None]
        if own:
            width = max(len(new.pages) for new in own)
            cells = np.zeros((len(own), 2 + width), dtype=np.int64)
            for row, new in zip(cells, own, strict=True):
                row[:2] = new.row, new.length
                row[2 : 2 + len(new.pages)] = new.pages
            packed = upload(cells, self.device)
            rows = packed[:, 0]
            self.length[rows] = packed[:, 1]
            if len(self.next_tokens) > 1:  # drafts beyond a row's pages are written to page 0
                self.page_table[rows] = 0
            self.page_table[rows, :width] = packed[:, 2:].to(torch.int32)
        if self.window_table is not None and (width := max((len(new.window_pages) for new in new_rows), default=0)):
            cells = np.zeros((len(new_rows), 1 + width), dtype=np.int64)
            for row, new in zip(cells, new_rows, strict=True):
                row[0] = new.row
                row[1 : 1 + len(new.window_pages)] = new.window_pages
            packed = upload(cells, self.device)
            self.window_table[packed[:, 0], :width] = packed[:, 1:].to(torch.int32)
        copies = [(new.row, new.copy_of, new.length) for new in new_rows if new.copy_of is not None]
        if copies:
            rows, sources, lengths = self.upload([value for copy in copies for value in copy]).view(-1, 3).unbind(1)
            self.length[rows] = lengths
            if self.state_length is not None:
                self.state_length[rows] = lengths
            # The source still writes to one copied page. `grow` replaces it, or the copy's length ends before it.
            self.page_table[rows] = self.page_table[sources]
        for new in new_rows:
            self.lengths[new.row] = new.length
            self._behind.discard(new.row)
        if self.adapter is not None:
            self._adapt(self.adapter, new_rows)
        if self._shifts is not None and new_rows:
            self._shift(self._shifts, new_rows)

    def _adapt(self, adapter: Tensor, new_rows: Sequence[NewRow]) -> None:
        """Update the adapters of rows whose adapter changes."""
        changed = []
        for new in sorted(new_rows, key=lambda new: new.copy_of is not None):
            place = new.adapter if new.copy_of is None else self.adapters[new.copy_of]
            if place != self.adapters[new.row]:
                self.adapters[new.row] = place
                changed.append(new.row)
        if changed:
            self._adapted = sum(place != NO_ADAPTER for place in self.adapters)
            rows, places = self.upload(changed + [self.adapters[row] for row in changed]).view(2, -1)
            adapter[rows] = places.to(torch.int32)

    def _shift(self, shifts: Tensor, new_rows: Sequence[NewRow]) -> None:
        """Update the shifts of rows whose shift changes."""
        changed = []
        for new in new_rows:
            shift = new.shift + (self._near_shift if new.near else 0)
            if shift != self._host_shifts[new.row]:
                self._host_shifts[new.row] = shift
                changed.append(new.row)
        if changed:
            index, values = self.upload(changed + [self._host_shifts[row] for row in changed]).view(2, -1)
            shifts[index] = values

    def adapters_of(self, rows: Iterable[int]) -> Tensor | None:
        """Return the adapter places of all rows, [rows] int32, or None if none of the given rows has an adapter."""
        return self.adapter if self._adapted and any(self.adapters[row] for row in rows) else None

    def has_adapters(self, plan: StepPlan) -> bool:
        """Return whether a token of the step has an adapter."""
        return self.adapters_of([*plan.decode, *(chunk.row for chunk in plan.prefill)]) is not None

    def grow(self, new_pages: Sequence[NewPage], new_window_pages: Sequence[NewPage] = ()) -> None:
        """Write new pages into the tables. Window pages may also replace older ones."""
        for table, entries in ((self.page_table, new_pages), (self.window_table, new_window_pages)):
            if entries and table is not None:
                row, index, page = self.upload([value for entry in entries for value in entry]).view(-1, 3).unbind(1)
                table[row, index] = page.to(torch.int32)

    def drafts(self, rows: Tensor, count: int) -> Tensor:
        """Return the next `count` drafts of rows, [n, count] int64. rows: [n] int64."""
        return self.next_tokens[1 : count + 1].index_select(1, rows).T

    def set_lengths(self, rows: Tensor, lengths: Tensor, padded: bool) -> None:
        """Set the lengths of rows on the device to their lengths after this step.

        rows, lengths: [n] int64. padded: whether `rows` contains the padding row.
        """
        self.length.index_copy_(0, rows, lengths)
        if padded:
            self.length[self.padding :].zero_()

    def advance(self, plan: StepPlan) -> None:
        """Set `lengths` to the rows' lengths after the step."""
        if plan.contexts:
            for row, length in zip(plan.decode, plan.contexts, strict=True):
                self.lengths[row] = length
        else:
            for row in plan.decode:
                self.lengths[row] += 1
        for chunk in plan.prefill:
            self.lengths[chunk.row] = chunk.start + len(chunk.token_ids)
        if self.state_length is not None:
            self._behind.difference_update(plan.decode, (chunk.row for chunk in plan.prefill))
            self._behind.update(itertools.compress(plan.decode, plan.drafts))

    def states_are_complete(self, rows: Iterable[int]) -> bool:
        """Return whether the recurrent states of rows contain all their tokens after the newest step that began."""
        return not self._behind or self._behind.isdisjoint(rows)

    def rotary_positions(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the positions [tokens] that `Decoder.forward` needs, for sequence positions of rows."""
        return positions if self._shifts is None else positions + self._shifts[rows]

    def slots(self, rows: Tensor, positions: Tensor, page_size: int, table: Tensor | None = None) -> Tensor:
        """Return where each token's keys and values are written: page * page_size + offset, [tokens] int64.

        rows, positions: [tokens]. table: `page_table` or `window_table`.
        """
        table = self.page_table if table is None else table
        index = positions // page_size
        pages = table.view(-1).index_select(0, rows * table.shape[1] + index)
        return positions + (pages - index) * page_size

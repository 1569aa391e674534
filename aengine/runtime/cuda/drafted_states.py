"""What recurrent layers read in captured steps of decodes whose rows may verify drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.cache.snapshots import slot_of
from aengine.cache.states import StatePool
from aengine.kernels.drafted.base import DraftedInputs
from aengine.kernels.recurrent.state import DraftedBatch, StateBatch
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan


class DraftedStates:
    """The slots of a batch, and the snapshots that it saves, in a device buffer with a fixed address.

    The device knows how many tokens each state contains (`Rows.state_length`), because earlier steps may have accepted
    any number of drafts.
    """

    def __init__(self, pool: StatePool, rows: Rows, lengths: Tensor, max_rows: int, max_tokens: int) -> None:
        """Args:
        lengths: `Rows.state_length`.
        max_rows, max_tokens: of a step.
        """
        self.pool = pool
        self._rows = rows
        self._lengths = lengths
        # For each row its slot, after how many tokens a state is saved, and in which slot. All are 0 for padding.
        self._cells = torch.zeros((3, max_rows), dtype=torch.int64, device=rows.device)
        self._current: tuple[int, list[int], Sequence[tuple[int, int, int]]] = (0, [], ())  # the contents of `_cells`
        self._no_saves = torch.zeros(max_tokens, dtype=torch.int32, device=rows.device)

    def clear(self) -> None:
        """Make all rows padding."""
        self._cells.zero_()
        self._current = (0, [], ())

    def send(self, plan: StepPlan, size: int) -> None:
        """Upload what a step of at most `size` rows reads, unless the device has it already."""
        if self._current == (size, plan.decode, plan.state_saves):
            return
        places = {row: place for place, row in enumerate(plan.decode)}
        slots = [slot_of(row) for row in plan.decode] + [0] * (size - len(places))
        save_after, save_slots = [0] * size, [0] * size
        for row, tokens, slot in plan.state_saves:
            save_after[places[row]], save_slots[places[row]] = tokens, slot
        self._cells[:, :size].copy_(self._rows.upload(slots + save_after + save_slots).view(3, -1))
        self._current = (size, list(plan.decode), list(plan.state_saves))

    def batch(self, row_index: Tensor, inputs: DraftedInputs, starts: Tensor, queries: int) -> StateBatch:
        """Return the batch of a step, and advance `Rows.state_length`. A graph captures this.

        The states before a step without drafts contain all tokens, so it runs as without speculation.

        Args:
            row_index: [n] int64
            starts: [n + 1] int32: the first token of each row, and the number of tokens.
            queries: tokens of each row.
        """
        n = len(row_index)
        slots, save_after, save_slots = self._cells[:, :n]
        before = inputs.positions.view(n, queries)[:, 0]
        read = self._lengths.index_select(0, row_index)
        self._lengths.index_copy_(0, row_index, before + 1)  # the first token is certain
        of_rows = slots.to(torch.int32)
        if queries == 1:
            saves = torch.where(save_after == before + 1, save_slots, 0).to(torch.int32)
            return StateBatch(of_rows, of_rows, starts[n:], inputs.positions, saves, n)
        return StateBatch(
            slots=of_rows,
            sources=of_rows,
            starts=starts,  # every row is a chunk
            positions=inputs.positions,
            saves=self._no_saves[: n * queries],
            num_decodes=0,
            drafted=DraftedBatch(read, save_after, save_slots.to(torch.int32), has_prompts=False),
        )

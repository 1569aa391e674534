"""What captured decode steps read besides their rows, in device buffers with fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.cache.snapshots import slot_of
from aengine.cache.states import StatePool
from aengine.kernels.attention.prefix_attention import SharedRuns
from aengine.kernels.decodes.base import DecodeInputs
from aengine.kernels.recurrent.state import DraftedBatch, StateBatch
from aengine.runtime.step.rows import Rows
from aengine.step_plan import MOST_SHARED_RUNS, SharedRun, StepPlan


class SharedBuffers:
    """The shared runs of pages of a batch."""

    def __init__(self, max_rows: int, rows: Rows) -> None:
        self._rows = rows
        self._max_rows = max_rows
        # members [max_rows], starts [max_rows], group_starts [MOST_SHARED_RUNS + 1], lens [MOST_SHARED_RUNS]
        self._cells = torch.zeros(2 * max_rows + 2 * MOST_SHARED_RUNS + 1, dtype=torch.int32, device=rows.device)
        self._current: Sequence[SharedRun] = ()

    def runs(self, size: int) -> SharedRuns:
        """Return views for a batch of this size."""
        members, starts, group_starts, lens = self._cells.split(
            [self._max_rows, self._max_rows, MOST_SHARED_RUNS + 1, MOST_SHARED_RUNS]
        )
        return SharedRuns(members=members[:size], group_starts=group_starts, lens=lens, starts=starts[:size])

    def send(self, shared: Sequence[SharedRun]) -> None:
        """Upload the runs, unless the device has them already."""
        if shared is self._current:
            return
        members = [place for run in shared for place in run.members]
        starts = [0] * self._max_rows
        group_starts = [0]
        for run in shared:
            for place in run.members:
                starts[place] = run.tokens
            group_starts.append(group_starts[-1] + len(run.members))
        group_starts += group_starts[-1:] * (MOST_SHARED_RUNS - len(shared))
        lens = [run.tokens for run in shared] + [0] * (MOST_SHARED_RUNS - len(shared))
        members += [0] * (self._max_rows - len(members))
        self._cells.copy_(self._rows.upload(members + starts + group_starts + lens))
        self._current = shared


class StateBuffers:
    """The slots of a batch, and with speculation the snapshots that it saves.

    The device knows how many tokens each state contains (`Rows.state_length`), because earlier steps may have accepted
    any number of drafts.
    """

    def __init__(self, pool: StatePool, rows: Rows, max_rows: int, max_tokens: int) -> None:
        """max_rows, max_tokens: of a step."""
        self.pool = pool
        self._rows = rows
        # For each row: its slot. With drafts: after how many tokens a state is saved, and in which slot. 0 for padding.
        self._slots = torch.zeros(max_rows, dtype=torch.int32, device=rows.device)
        self._saves = torch.zeros((2, max_rows), dtype=torch.int64, device=rows.device)
        # The contents of both.
        self._current: tuple[int, list[int], Sequence[tuple[int, int, int]]] = (0, [], ())
        self._no_saves = torch.zeros(max_tokens, dtype=torch.int32, device=rows.device)

    def clear(self) -> None:
        """Make all rows padding."""
        self._slots.zero_()
        self._saves.zero_()
        self._current = (0, [], ())

    def send(self, plan: StepPlan, size: int) -> None:
        """Upload what a step of at most `size` rows reads, unless the device has it already."""
        before, rows, saves = self._current
        if (before, rows) != (size, plan.decode):
            slots = [slot_of(row) for row in plan.decode] + [0] * (size - len(plan.decode))
            self._slots[:size].copy_(self._rows.upload(slots))
        elif saves == plan.state_saves:
            return
        if saves or plan.state_saves:
            places = {row: place for place, row in enumerate(plan.decode)}
            after, into = ([0] * self._saves.shape[1] for _ in range(2))
            for row, tokens, slot in plan.state_saves:
                after[places[row]], into[places[row]] = tokens, slot
            self._saves.copy_(self._rows.upload(after + into).view(2, -1))
        self._current = (size, list(plan.decode), list(plan.state_saves))

    def batch(self, row_index: Tensor, inputs: DecodeInputs, starts: Tensor, queries: int) -> StateBatch:
        """Return the batch of a step, and advance `Rows.state_length`. A graph captures this.

        The states before a step without drafts contain all tokens, so it runs as without speculation.

        Args:
            row_index: [n] int64
            starts: [n + 1] int32: the first token of each row, and the number of tokens.
            queries: tokens of each row.
        """
        n, lengths = len(row_index), self._rows.state_length
        slots, saves = self._slots[:n], self._no_saves[: n * queries]
        if lengths is None:
            return StateBatch(slots, slots, starts[n:], inputs.positions, saves, n)
        save_after, save_slots = self._saves[:, :n]
        before = inputs.positions.view(n, queries)[:, 0]
        read = lengths.index_select(0, row_index)
        lengths.index_copy_(0, row_index, before + 1)  # the first token is certain
        if queries == 1:
            saves = torch.where(save_after == before + 1, save_slots, 0).to(torch.int32)
            return StateBatch(slots, slots, starts[n:], inputs.positions, saves, n)
        return StateBatch(
            slots=slots,
            sources=slots,
            starts=starts,  # every row is a chunk
            positions=inputs.positions,
            saves=saves,
            num_decodes=0,
            drafted=DraftedBatch(read, save_after, save_slots.to(torch.int32), has_prompts=False),
        )

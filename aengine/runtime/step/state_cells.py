"""The part of a step's description that only recurrent layers need. `cells.py` has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.cache.snapshots import slot_of
from aengine.kernels.recurrent.state import DraftedBatch, StateBatch
from aengine.runtime.step.rows import Rows
from aengine.step_plan import StepPlan


@dataclass(slots=True)
class StateCells:
    """What recurrent layers need of a step, in int64 numbers, as in `StateBatch` and `DraftedBatch`."""

    slots: Tensor  # [sequences]
    sources: Tensor  # [sequences]
    saves: Tensor  # [tokens]
    decoding: Tensor  # [sequences]: 1 for the rows of `StepPlan.decode`, else 0
    save_after: Tensor  # [sequences]
    save_slots: Tensor  # [sequences]

    def resolve(
        self, sequences: Tensor, starts: Tensor, rows: Rows, positions: Tensor, before: Tensor, lens: Tensor
    ) -> StateBatch:
        """Return the batch of recurrent layers, and advance `Rows.state_length`.

        Args:
            sequences: [sequences] int64, the row of each.
            starts: [chunks + 1] int32, as in `StateBatch`.
            positions: [tokens] int64
            before: [sequences] int64, lengths before the step.
            lens: [sequences] int64, lengths after the step.
        """
        drafted = None
        if rows.state_length is not None:
            decoding = self.decoding > 0
            read = torch.where(decoding, rows.state_length.index_select(0, sequences), -1)
            drafted = DraftedBatch(read, self.save_after, self.save_slots.to(torch.int32))
            rows.state_length.index_copy_(0, sequences, torch.where(decoding, before + 1, lens))
        return StateBatch(
            slots=self.slots.to(torch.int32),
            sources=self.sources.to(torch.int32),
            starts=starts,
            positions=positions,
            saves=self.saves.to(torch.int32),
            num_decodes=len(sequences) - len(starts) + 1,
            drafted=drafted,
        )


def fields(cells: NDArray[np.int64], widths: list[int]) -> Iterator[NDArray[np.int64]]:
    """Return views of consecutive fields with these widths."""
    end = 0
    for width in widths:
        end += width
        yield cells[end - width : end]


def describe_states(plan: StepPlan, first: int, widths: list[int]) -> NDArray[np.int64]:
    """Return the numbers of `StateCells` as one array. A decode that is padding has slot -1.

    Args:
        first: The first sequence that is a chunk.
        widths: The lengths of the fields.
    """
    cells = np.zeros(sum(widths), dtype=np.int64)
    slots, sources, saves, decoding, save_after, save_slots = fields(cells, widths)
    drafted = sum(1 for drafts in plan.drafts if drafts)
    decodes = len(plan.decode) - drafted
    slots[decodes:first] = -1
    for places, rows in (
        (slice(decodes), plan.decode[:decodes]),
        (slice(first, first + drafted), plan.decode[decodes:]),
    ):
        slots[places] = sources[places] = [slot_of(row) for row in rows]
        decoding[places] = 1
    at = plan.decode_tokens
    for place, chunk in enumerate(plan.prefill, first + drafted):
        slots[place] = slot_of(chunk.row)
        sources[place] = slot_of(chunk.row) if chunk.start else 0  # position 0 starts with an empty state
        for count, slot in chunk.saves:
            saves[at + count - 1] = slot
        at += len(chunk.token_ids)
    if plan.state_saves:
        place_of = {row: i if i < decodes else first + i - decodes for i, row in enumerate(plan.decode)}
        for row, tokens, slot in plan.state_saves:
            save_after[place_of[row]], save_slots[place_of[row]] = tokens, slot
    return cells

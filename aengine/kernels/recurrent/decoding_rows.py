"""The sequences of a batch that decode in a step in which rows may have drafts. For references in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.kernels.recurrent.state import DraftedBatch, StateBatch


@dataclass(slots=True)
class DecodingRows:
    """The sequences of a batch that decode."""

    slots: Tensor  # [rows] int64
    first: Tensor  # [rows] int64: the first token of each
    counts: Tensor  # [rows] int64: how many tokens each has
    read: Tensor  # as in `DraftedBatch`, like the next two
    save_after: Tensor
    save_slots: Tensor

    @classmethod
    def from_batch(cls, batch: StateBatch, drafted: DraftedBatch) -> DecodingRows:
        decodes = torch.arange(batch.num_decodes, device=batch.starts.device)
        first = torch.cat((decodes, batch.starts[:-1].long()))
        counts = torch.cat((torch.ones_like(decodes), batch.starts.diff().long()))
        of = ((drafted.read >= 0) & (batch.slots > 0) & (counts > 0)).nonzero().flatten()
        slots = batch.slots[of].long()
        return cls(
            slots, first[of], counts[of], drafted.read[of], drafted.save_after[of], drafted.save_slots[of].long()
        )


def most(counts: Tensor) -> int:
    """Return the largest number, or 0 if there are none. This waits for the device."""
    return int(counts.max()) if len(counts) else 0

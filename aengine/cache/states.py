"""The tensors that hold the states of recurrent layers. A state has the same size for a sequence of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aengine.cache.snapshots import SnapshotRoom, slot_of
from aengine.kernels.recurrent.state import DraftUpdates, RecurrentState


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of a slot: the state of one sequence in each recurrent layer."""

    num_layers: int
    conv_width: int  # tokens that the convolution's state holds
    channels: int  # of the convolution
    recurrence: tuple[int, int, int]  # shape of the recurrent state: value_heads, key_dim, value_dim
    dtype: torch.dtype  # of the recurrent state
    conv_dtype: torch.dtype  # of the convolution's state

    @property
    def slot_bytes(self) -> int:
        """The bytes of one slot over all layers."""
        conv = self.conv_width * self.channels * self.conv_dtype.itemsize
        return self.num_layers * (conv + math.prod(self.recurrence) * self.dtype.itemsize)

    @property
    def key_heads(self) -> int:
        value_heads, key_dim, value_dim = self.recurrence
        if not value_heads:  # a convolution without a recurrent state
            return 0
        return (self.channels - value_heads * value_dim) // (2 * key_dim)

    @property
    def draft_bytes(self) -> int:
        """The bytes that all layers keep of one draft, as in `DraftUpdates`."""
        value_heads, key_dim, value_dim = self.recurrence
        numbers = self.key_heads * key_dim + value_heads * (value_dim + 1)
        return self.num_layers * (self.channels * self.conv_dtype.itemsize + 4 * numbers)


@dataclass(frozen=True, slots=True)
class StateRoom:
    """The slots of a model with recurrent layers: one for each row, and the snapshots."""

    shape: StateShape
    rows: int
    snapshots: SnapshotRoom
    most_drafts: int = 0  # of a row in a step

    @property
    def slots(self) -> int:
        return slot_of(self.rows) + self.snapshots.count

    @property
    def draft_entries(self) -> int:
        """`DraftUpdates.entries`."""
        return 2 * self.most_drafts + 1 if self.most_drafts else 0

    @property
    def bytes_of_row(self) -> int:
        """The bytes of a row: its slot, and what is kept of its drafts."""
        return self.shape.slot_bytes + self.draft_entries * self.shape.draft_bytes

    @property
    def row_bytes(self) -> int:
        """The bytes of all rows and of the unused slot 0."""
        return slot_of(self.rows) * self.bytes_of_row

    @property
    def snapshot_bytes(self) -> int:
        return self.snapshots.count * self.shape.slot_bytes


class StatePool:
    """Slots of states: slot 0 is unused, row r has slot r + 1, and the snapshots follow the rows.

    conv [slots, layers, width, channels], recurrence [slots, layers, value_heads, key_dim, value_dim]. The slot is the
    first dimension, so a copy of a slot copies two contiguous ranges. What is kept of drafts is not copied: a row that
    is copied has none.
    """

    def __init__(self, room: StateRoom, device: torch.device) -> None:
        self.shape = shape = room.shape
        # Not zeroed: every slot is written before it is read.
        self._conv = torch.empty(
            (room.slots, shape.num_layers, shape.conv_width, shape.channels), dtype=shape.conv_dtype, device=device
        )
        self._recurrence = torch.empty(
            (room.slots, shape.num_layers, *shape.recurrence), dtype=shape.dtype, device=device
        )
        drafts = self._drafts(slot_of(room.rows), room.draft_entries, device) if room.most_drafts else None
        self._layers = [
            RecurrentState(self._conv[:, i], self._recurrence[:, i], None if drafts is None else drafts[i])
            for i in range(shape.num_layers)
        ]

    def _drafts(self, slots: int, entries: int, device: torch.device) -> list[DraftUpdates]:
        """Return the memory for drafts in each layer."""
        shape, layers = self.shape, self.shape.num_layers
        value_heads, key_dim, value_dim = shape.recurrence

        def empty(*entry: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((layers, slots, entries, *entry), dtype=dtype, device=device)

        inputs, keys = empty(shape.channels, dtype=shape.conv_dtype), empty(shape.key_heads, key_dim)
        corrections, decays = empty(value_heads, value_dim), empty(value_heads)
        return [DraftUpdates(*parts) for parts in zip(inputs, keys, corrections, decays)]

    def layer(self, i: int) -> RecurrentState:
        """Return views of the i-th recurrent layer's states."""
        return self._layers[i]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole slots, (source, destination) each, in the given order."""
        for source, destination in pairs:
            self._conv[destination].copy_(self._conv[source])
            self._recurrence[destination].copy_(self._recurrence[source])

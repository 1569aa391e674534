"""The tensors that hold the states of recurrent layers. A state has the same size for a sequence of any length."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aengine.cache.snapshots import SnapshotRoom, slot_of
from aengine.kernels.delta.base import DeltaState


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


@dataclass(frozen=True, slots=True)
class StateRoom:
    """The slots of a model with recurrent layers: one for each row, and the snapshots."""

    shape: StateShape
    rows: int
    snapshots: SnapshotRoom

    @property
    def slots(self) -> int:
        return slot_of(self.rows) + self.snapshots.count

    @property
    def row_bytes(self) -> int:
        """The bytes of the rows' slots and of the unused slot 0."""
        return slot_of(self.rows) * self.shape.slot_bytes

    @property
    def snapshot_bytes(self) -> int:
        return self.snapshots.count * self.shape.slot_bytes


class StatePool:
    """Slots of states: slot 0 is unused, row r has slot r + 1, and the snapshots follow the rows.

    conv [slots, layers, width, channels], recurrence [slots, layers, value_heads, key_dim, value_dim]. The slot is the
    first dimension, so a copy of a slot copies two contiguous ranges.
    """

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.shape = shape
        # Not zeroed: every slot is written before it is read.
        self._conv = torch.empty(
            (num_slots, shape.num_layers, shape.conv_width, shape.channels), dtype=shape.conv_dtype, device=device
        )
        self._recurrence = torch.empty(
            (num_slots, shape.num_layers, *shape.recurrence), dtype=shape.dtype, device=device
        )
        self._layers = [DeltaState(self._conv[:, i], self._recurrence[:, i]) for i in range(shape.num_layers)]

    def layer(self, i: int) -> DeltaState:
        """Return views of the i-th recurrent layer's states."""
        return self._layers[i]

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole slots, (source, destination) each, in the given order."""
        for source, destination in pairs:
            self._conv[destination].copy_(self._conv[source])
            self._recurrence[destination].copy_(self._recurrence[source])

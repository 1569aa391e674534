"""The memory of recurrent states, and of what is kept of drafts."""

from __future__ import annotations

import pytest
import torch

from aengine.cache.snapshots import SnapshotRoom
from aengine.cache.states import StatePool, StateRoom, StateShape

SHAPE = StateShape(3, 4, 2 * 2 * 8 + 6 * 12, (6, 8, 12), torch.float32, torch.bfloat16)
CPU = torch.device("cpu")


def allocated(pool: StatePool) -> int:
    """Return the bytes of all tensors of a pool."""
    tensors = []
    for i in range(pool.shape.num_layers):
        layer = pool.layer(i)
        tensors += [layer.conv, layer.recurrence]
        if layer.drafts is not None:
            tensors += [layer.drafts.inputs, layer.drafts.keys, layer.drafts.corrections, layer.drafts.decays]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("most_drafts", [0, 1, 4])
def test_a_room_counts_every_byte(most_drafts: int) -> None:
    room = StateRoom(SHAPE, 5, SnapshotRoom(7), most_drafts)
    assert allocated(StatePool(room, CPU)) == room.row_bytes + room.snapshot_bytes


def test_drafts_of_rows_and_of_layers_are_apart() -> None:
    pool = StatePool(StateRoom(SHAPE, 2, SnapshotRoom(), most_drafts=3), CPU)
    for i in range(3):
        drafts = pool.layer(i).drafts
        assert drafts is not None
        assert drafts.entries == 7
        assert [len(part) for part in (drafts.inputs, drafts.keys, drafts.corrections, drafts.decays)] == [3] * 4
        drafts.decays.fill_(i)
        drafts.decays[1] += 10
    for i in range(3):
        drafts = pool.layer(i).drafts
        assert drafts is not None
        assert drafts.decays[:, 0, 0].tolist() == [i, i + 10, i]

"""The memory through which the GPUs of one host exchange data. All belong to one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import ConfigError

PROGRAMS = 256  # the most programs of a kernel that pushes
LANES = 1 << 21  # lanes of a mailbox for one call: 32 MB
LANE = 16  # bytes
# Slots for parts that a copy engine copies: one more than the sums that may be pending (`peers.py`).
SLOTS = 3
SLOT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The memory of one rank, on its device."""

    lanes: Tensor  # int32 [2, ranks, programs, capacity, 4]
    addresses: Tensor  # int64 [ranks]: addresses of every rank's lanes
    turns: Tensor  # int32 [programs]: which of the two regions each program uses next
    control: Tensor  # int64 [2]: 1 after a wait has timed out; nanoseconds to wait
    slots: Sequence[Tensor] = ()  # if there are two ranks: for each rank uint8 [SLOTS, SLOT_BYTES] on its device

    def renew(self, patience: float) -> None:
        """Reset the memory. No device may be running work on it.

        patience: seconds to wait for another rank. 0: as if a wait had timed out, so nothing is sent.
        """
        self.lanes.fill_(-1)
        self.turns.zero_()
        self.control[0] = int(patience == 0)
        self.control[1] = int(patience * 1e9)


def open_mailboxes(devices: Sequence[torch.device], patience: float) -> list[Mailbox]:
    """Return a mailbox for each rank, on its device, and give devices access to each other's memory.

    patience: seconds to wait for another rank. Waits for all devices. Raises `ConfigError` if devices cannot reach each
    other.
    """
    for device in devices:
        for other in devices:
            if device != other and not torch.cuda.can_device_access_peer(device, other):
                raise ConfigError(
                    f"{device} has no access to the memory of {other}, by NVLink or peer to peer over PCIe: one model "
                    f"cannot be spread over both"
                )
    for device in devices:
        for other in devices:
            torch.zeros(1, device=device).to(other)  # this enables access to the other's memory
    shape = (2, len(devices), PROGRAMS, LANES // len(devices) // PROGRAMS, LANE // 4)
    lanes = [torch.empty(shape, dtype=torch.int32, device=device) for device in devices]
    slots = [
        torch.empty(SLOTS, SLOT_BYTES, dtype=torch.uint8, device=device) for device in devices if len(devices) == 2
    ]
    boxes = [
        Mailbox(
            own,
            torch.tensor([other.data_ptr() for other in lanes], dtype=torch.int64, device=device),
            torch.empty(PROGRAMS, dtype=torch.int32, device=device),
            torch.empty(2, dtype=torch.int64, device=device),
            slots,
        )
        for device, own in zip(devices, lanes, strict=True)
    ]
    renew(boxes, patience)
    return boxes


def renew(boxes: Sequence[Mailbox], patience: float) -> None:
    """Reset the mailboxes of all ranks. Waits for their devices. patience: seconds to wait for another rank."""
    for box in boxes:
        torch.cuda.synchronize(box.lanes.device)
    for box in boxes:
        box.renew(patience)
        torch.cuda.synchronize(box.lanes.device)

"""The memory through which the GPUs of one host, all of one process, reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aengine.errors import ConfigError

PROGRAMS = 256
LANES = 1 << 21  # of a mailbox for one call: 32 MB
LANE = 16  # bytes
# Parts that a copy engine has brought: as many of them as are under way at once, and one more (`peers.py`).
SLOTS = 3
SLOT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Mailbox:
    """What one rank has on its device."""

    lanes: Tensor  # int32 [2, ranks, programs, capacity, 4]
    addresses: Tensor  # int64 [ranks]: of the lanes of every rank
    turns: Tensor  # int32 [programs]: which of its two regions each program uses next
    control: Tensor  # int64 [2]: whether somebody gave up; how long to wait, in nanoseconds
    slots: Sequence[Tensor] = ()  # of two ranks, of each: uint8 [SLOTS, SLOT_BYTES], on its device

    def renew(self, patience: float) -> None:
        """As it was when it was opened. The device is to be at rest, as are all others.

        Without patience it has given up from the start: nothing is sent.
        """
        self.lanes.fill_(-1)
        self.turns.zero_()
        self.control[0] = int(patience == 0)
        self.control[1] = int(patience * 1e9)


def open_mailboxes(devices: Sequence[torch.device], patience: float) -> list[Mailbox]:
    """One for each rank, on its device, with access to each other's memory; waits for all devices.

    patience: seconds to wait for another rank. Raises `ConfigError` where the devices cannot reach each other.
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
            torch.zeros(1, device=device).to(other)  # from now on each may read and write what the other has
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
    """Begin anew, on all ranks; waits for all of them. patience: seconds to wait for another rank."""
    for box in boxes:
        torch.cuda.synchronize(box.lanes.device)
    for box in boxes:
        box.renew(patience)
        torch.cuda.synchronize(box.lanes.device)

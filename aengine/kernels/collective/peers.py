"""Ranks that are GPUs of one host and one process: their kernels write and read each other's memory.

Each rank's calls are launched on its own device and stream, whoever comes first waits for the others on the device. One
thread may launch for all of them, in any order, as long as nothing between waits for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from aengine.kernels.collective.mailboxes import CAPACITY, LANE, PROGRAMS, Mailbox, open_mailboxes, renew
from aengine.kernels.collective.pulled import pulled_gather_kernel, pulled_sum_kernel
from aengine.kernels.collective.pushed import pushed_gather_kernel, pushed_sum_kernel
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm


@dataclass(frozen=True, slots=True)
class Pushed:
    """How what is pushed is cut."""

    lanes: int  # a program takes at once; not with a norm
    num_warps: int
    programs: int = PROGRAMS


@dataclass(frozen=True, slots=True)
class Pulled:
    """How what is pulled is cut."""

    block: int  # elements a program takes at once
    num_warps: int
    programs: int


def connect(devices: Sequence[torch.device], patience: float = 2.5) -> list[PeerCollective]:
    """One `PeerCollective` for each device, by rank.

    patience: seconds that a kernel waits for another rank; not less than a host may take between launching for the
    first and the last of them, compilers included. Raises `ConfigError` where the devices cannot reach each other.
    """
    boxes = open_mailboxes(devices, patience)
    return [PeerCollective(index, len(devices), box) for index, box in enumerate(boxes)]


def begin_anew(collectives: Sequence[PeerCollective], patience: float) -> None:
    """After a rank has given up: as if nothing had been called yet. Waits for all devices.

    patience: seconds. With 0 nobody waits for anybody, and all results are worthless: so whole ranks can be rehearsed
    one after the other, while kernels are compiled and loaded, which waits for the device that loads.
    """
    renew([one.box for one in collectives], patience)


class PeerCollective:
    """`Collective` of one such GPU. Parts are contiguous float16, bfloat16 or float32, in rows of whole lanes of 16
    bytes where they are summed.

    failed: int32 [1] on the device, 1 after a kernel of this rank has given up waiting. From then on results are
    worthless, on every rank, and come soon.
    """

    def __init__(self, index: int, count: int, box: Mailbox) -> None:
        self.index = index
        self.count = count
        self.failed = box.control.view(torch.int32)[:1]
        self.box = box
        self._overlap = launch_for(box.lanes.device).overlap

    def sum(self, part: Tensor, residual: Tensor | None = None, config: Pushed | Pulled | None = None) -> Tensor:
        lanes = _lanes(part, residual)
        config = config or sum_config(lanes, self.count)
        if not lanes:
            return part
        if isinstance(config, Pushed):
            self._push(part, residual, None, None, 0.0, lanes, config.lanes, config)
            return part
        blocks = triton.cdiv(part.numel(), config.block * self.count)
        pulled_sum_kernel[(min(config.programs, blocks),)](
            part, residual, self.box.addresses, self.box.turns, self.box.control, self.index, part.numel(),
            BLOCK=config.block, COUNT=self.count, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY,
            THREADS=32 * config.num_warps, OVERLAP=self._overlap, num_warps=config.num_warps,
            launch_pdl=self._overlap,
        )  # fmt: skip
        return part

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        lanes = _lanes(part, residual)
        tokens, width = part.shape
        row = width * part.element_size() // LANE
        if tokens * row > PROGRAMS * CAPACITY // 2 or row > CAPACITY or norm.weight.dtype != part.dtype or not lanes:
            x = self.sum(part, residual)
            return x, norm(x)
        normed = torch.empty_like(part)
        warps = min(16, max(1, power_of_two(width) // 512))  # as the norm alone has them
        self._push(part, residual, norm.weight, normed, norm.eps, lanes, row, Pushed(row, warps))
        return part, normed

    def gather(self, part: Tensor, width: int, config: Pushed | Pulled | None = None) -> Tensor:
        rows, n = part.shape
        if rest := -n * part.element_size() % LANE:
            padded = F.pad(part, (0, rest // part.element_size()))
            whole = self.gather(padded, self.count * padded.shape[1], config).view(rows, self.count, -1)
            return whole[:, :, :n].reshape(rows, -1)[:, :width].contiguous()
        lanes = _lanes(part, None)
        out = part.new_empty(rows, self.count * n)
        config = config or gather_config(lanes, self.count)
        box, row = self.box, n * part.element_size() // LANE
        if not lanes:
            pass
        elif isinstance(config, Pushed):
            pushed_gather_kernel[(min(config.programs, triton.cdiv(lanes, config.lanes)),)](
                part, out, box.addresses, box.turns, box.control, self.index, lanes, row,
                LANES=config.lanes, COUNT=self.count, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY, OVERLAP=self._overlap,
                num_warps=config.num_warps, launch_pdl=self._overlap,
            )  # fmt: skip
        else:
            blocks = rows * triton.cdiv(n, config.block)
            pulled_gather_kernel[(min(config.programs, blocks),)](
                part, out, box.addresses, box.turns, box.control, self.index, rows, n,
                BLOCK=config.block, COUNT=self.count, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY,
                THREADS=32 * config.num_warps, OVERLAP=self._overlap, num_warps=config.num_warps,
                launch_pdl=self._overlap,
            )  # fmt: skip
        return out if width == out.shape[1] else out[:, :width].contiguous()

    def _push(
        self,
        part: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        normed: Tensor | None,
        eps: float,
        lanes: int,
        row: int,
        config: Pushed,
    ) -> None:
        box = self.box
        pushed_sum_kernel[(min(config.programs, triton.cdiv(lanes, row)),)](
            part, residual, weight, normed, box.addresses, box.turns, box.control, self.index, lanes, eps,
            ROW=row, LANES=power_of_two(row), COUNT=self.count, PROGRAMS=PROGRAMS, CAPACITY=CAPACITY,
            OVERLAP=self._overlap, num_warps=config.num_warps, launch_pdl=self._overlap,
        )  # fmt: skip


def sum_config(lanes: int, count: int) -> Pushed | Pulled:
    if lanes * LANE * (count - 1) > 1 << 20:
        return Pulled(4096, 16, 64)
    if lanes <= 16384:
        return Pushed(128, 4)
    return Pushed(256, 8)


def gather_config(lanes: int, count: int) -> Pushed | Pulled:
    if lanes * LANE * (count - 1) > 1 << 20:
        return Pulled(4096, 16, 64)
    return Pushed(128, 4)


def _lanes(part: Tensor, residual: Tensor | None) -> int:
    """How many lanes a part has. Raises `ValueError` for tensors that the kernels cannot read."""
    if not part.is_contiguous() or part.shape[-1] * part.element_size() % LANE:
        raise ValueError(f"parts are contiguous, in rows of whole lanes of {LANE} bytes, not {part.shape}")
    if residual is not None and not (residual.is_contiguous() and residual.dtype == part.dtype):
        raise ValueError(f"the residual is contiguous and of the parts' type, {part.dtype}")
    return part.numel() * part.element_size() // LANE

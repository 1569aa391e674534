"""Ranks that are GPUs of one host and one process: their kernels access each other's memory.

Each rank's calls are launched on its own device and stream, and ranks wait for each other on the device. One thread may
launch a graph or a step for every rank in turn, if nothing in between waits for a device. The first use of a kernel
waits, because it loads the kernel. So steps are rehearsed first, after `reset_collectives` with patience 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.errors import ConfigError
from aengine.kernels.collective.base import PendingSum
from aengine.kernels.collective.config import (
    OVERLAPPED_SUM,
    Pulled,
    Pushed,
    gather_config,
    norm_config,
    sum_config,
    sum_pieces,
)
from aengine.kernels.collective.kernels import (
    arrived_kernel,
    pulled_gather_kernel,
    pulled_sum_kernel,
    pushed_gather_kernel,
    pushed_sum_kernel,
)
from aengine.kernels.collective.mailboxes import LANE, SLOT_BYTES, SLOTS, Mailbox, open_mailboxes, renew
from aengine.kernels.collective.overlapped import CopiedSum, SideStreamSum, copy_across
from aengine.kernels.launch import launch_for, power_of_two
from aengine.kernels.linear.base import Norm


def connect(devices: Sequence[torch.device], patience: float = 2.5) -> list[PeerCollective]:
    """Return a `PeerCollective` for each device, in the order of the ranks.

    patience: seconds that a kernel waits for another rank. It must exceed the time to launch for all devices.
    Raises `ConfigError` if the devices are not 2, 4 or 8, or cannot reach each other.
    """
    if len(devices) not in (2, 4, 8) or len(set(devices)) != len(devices):
        raise ConfigError(f"2, 4 or 8 different devices can work together, not {', '.join(map(str, devices))}")
    boxes = open_mailboxes(devices, patience)
    return [PeerCollective(index, box) for index, box in enumerate(boxes)]


def reset_collectives(collectives: Sequence[PeerCollective], patience: float) -> None:
    """Reset all ranks, also after one has given up. Waits for all devices.

    patience: seconds that kernels wait for another rank. With 0 they neither send nor wait, and results are invalid.
    So ranks can rehearse steps one after the other, while kernels are compiled and loaded.
    """
    renew([one.box for one in collectives], patience)


class PeerCollective:
    """The `Collective` of one GPU.

    Pending sums: with two ranks, copy engines exchange the parts while processors multiply, and `finish` adds up the
    parts. More ranks compute the sum on a side stream. A rank copies its parts into the other's slots in turn. The
    slots suffice, because at most two sums are pending: when A copies its part n + 3, it has received B's part n + 2,
    and B finished the sum n before it computed that part. Between steps, the sum of the tokens' embeddings on the main
    stream keeps the ranks together.

    Parts are float16, bfloat16 or float32 and contiguous. For sums, a row must be a multiple of 16 bytes. Other parts
    raise `ValueError`. A sum overwrites its part. Calls must be in one order on the device, too: on one stream, or on
    streams that wait for each other.

    failed: int32 [1] on the device. It is 1 after a kernel of this rank has given up waiting. From then on the rank
    sends nothing, does not wait, and its results are invalid. So the others give up after one wait, too.
    """

    def __init__(self, index: int, box: Mailbox) -> None:
        _, self.count, programs, self._capacity, _ = box.lanes.shape
        self.index = index
        self.box = box
        self.failed = box.control.view(torch.int32)[:1]
        self.pending: deque[PendingSum] = deque()
        self._last: torch.cuda.Event | None = None  # recorded after the latest sum that has begun
        self._slot = 0  # slot for the next part
        self._in_pieces = False
        overlap = launch_for(box.lanes.device).overlap
        self._common = (box.addresses, box.turns, box.control, index)  # arguments of every kernel
        self._unchained = {"COUNT": self.count, "PROGRAMS": programs, "CAPACITY": self._capacity}
        self._constants = {**self._unchained, "OVERLAP": overlap, "launch_pdl": overlap}

    @cached_property
    def _side(self) -> torch.cuda.Stream:
        """The stream of pending sums. Its priority makes no difference (bench/KERNELS.md)."""
        return torch.cuda.Stream(self.box.lanes.device)

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        self.pending.clear()
        # A step that was not rehearsed may load kernels while other ranks wait. So it must not use additional kernels.
        self._in_pieces = halves and (rehearsal or torch.cuda.is_current_stream_capturing())
        self._slot = 0  # on all ranks, even if a failed step has begun more sums on one of them

    def sum(self, part: Tensor, residual: Tensor | None = None, config: Pushed | Pulled | None = None) -> Tensor:
        lanes = _lanes(part, residual)
        config = config or sum_config(lanes, self.count)
        if not lanes:
            return part
        self._keep_order()
        if isinstance(config, Pushed):
            self._push(part, residual, None, None, 0.0, lanes, config)
            return part
        self._pull(part, residual, part, config)
        return part

    def pieces(self, tokens: int) -> Sequence[slice]:
        return sum_pieces(tokens) if self._in_pieces else [slice(0, tokens)]

    def begin_sum(self, part: Tensor, residual: Tensor) -> PendingSum:
        _lanes(part, residual)
        if len(self.pending) >= SLOTS - 1:
            raise RuntimeError(f"{SLOTS - 1} sums are pending; finish the oldest first")
        size = part.numel() * part.element_size()
        self._side.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._side):
            if not self.box.slots or size > SLOT_BYTES:
                self._pull(part, residual, residual, OVERLAPPED_SUM)
                return SideStreamSum(part, residual, self._record(), self.pending)
            own, other = (self.box.slots[rank][self._slot, :size] for rank in (self.index, 1 - self.index))
            self._slot = (self._slot + 1) % SLOTS
            copy_across(part, other)
            arrived_kernel[(1,)](*self._common, THREADS=32, num_warps=1, **self._unchained)
            own = own.view(part.dtype).view(part.shape)
            return CopiedSum(part, residual, self._record(), self.pending, own, self.index == 0)

    def _record(self) -> torch.cuda.Event:
        self._last = self._side.record_event()
        return self._last

    def _keep_order(self) -> None:
        """Let later calls on the current stream wait for the pending sums, because both use the mailboxes."""
        if self.pending and self._last is not None:
            torch.cuda.current_stream(self.box.lanes.device).wait_event(self._last)

    def sum_and_norm(
        self, part: Tensor, residual: Tensor | None, norm: Norm, config: Pushed | None = None
    ) -> tuple[Tensor, Tensor]:
        lanes = _lanes(part, residual)
        config = config or norm_config(part.shape[0], part.shape[1] * part.element_size() // LANE, self.count)
        if config is None or not norm.is_rms or norm.weight.dtype != part.dtype or not lanes:
            x = self.sum(part, residual)
            return x, norm(x)
        self._keep_order()
        normed = torch.empty_like(part)
        self._push(part, residual, norm.weight, normed, norm.eps, lanes, config)
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
        if not lanes:
            return out
        self._keep_order()
        if isinstance(config, Pushed):
            grid = self._grid(lanes, config)
            pushed_gather_kernel[grid](
                part, out, *self._common, lanes, lanes // rows,
                LANES=config.lanes, num_warps=config.num_warps, **self._constants,
            )  # fmt: skip
        else:
            blocks = rows * -(-n // config.block)
            pulled_gather_kernel[(min(config.programs, blocks),)](
                part, out, *self._common, rows, n,
                BLOCK=config.block, THREADS=32 * config.num_warps, num_warps=config.num_warps, **self._constants,
            )  # fmt: skip
        return out if width == out.shape[1] else out[:, :width].contiguous()

    def _pull(self, part: Tensor, residual: Tensor | None, out: Tensor, config: Pulled) -> None:
        blocks = -(-part.numel() // (config.block * self.count))
        pulled_sum_kernel[(min(config.programs, blocks),)](
            part, residual, out, *self._common, part.numel(),
            BLOCK=config.block, THREADS=32 * config.num_warps, num_warps=config.num_warps, **self._constants,
        )  # fmt: skip

    def _push(
        self,
        part: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        normed: Tensor | None,
        eps: float,
        lanes: int,
        config: Pushed,
    ) -> None:
        grid = self._grid(lanes, config)
        pushed_sum_kernel[grid](
            part, residual, weight, normed, *self._common, lanes, eps,
            ROW=config.lanes, LANES=power_of_two(config.lanes), num_warps=config.num_warps,
            **self._constants,
        )  # fmt: skip

    def _grid(self, lanes: int, config: Pushed) -> tuple[int]:
        """Return the grid of a kernel that pushes. Raises `ValueError` if the mailboxes do not hold the lanes."""
        blocks = -(-lanes // config.lanes)  # triton.cdiv takes 3 us
        programs = min(config.programs, blocks)
        if -(-blocks // programs) * config.lanes > self._capacity:
            raise ValueError(f"{lanes} lanes are more than a mailbox holds")
        return (programs,)


def _lanes(part: Tensor, residual: Tensor | None) -> int:
    """Return how many lanes a part has. Raises `ValueError` for tensors that the kernels cannot read."""
    if not part.is_contiguous() or part.shape[-1] * part.element_size() % LANE:
        raise ValueError(f"parts must be contiguous, with rows of a multiple of {LANE} bytes, got {part.shape}")
    if residual is not None and not (residual.is_contiguous() and residual.dtype == part.dtype):
        raise ValueError(f"the residual must be contiguous and of the parts' dtype, {part.dtype}")
    return part.numel() * part.element_size() // LANE

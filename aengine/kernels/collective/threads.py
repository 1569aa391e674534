"""Ranks that are threads of one process. They exchange references to their parts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.kernels.collective.base import PendingSum
from aengine.kernels.linear.base import Norm


class Meeting:
    """A point at which `count` threads exchange parts. If one gives up, the others raise instead of waiting."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self.parts: list[Tensor | None] = [None] * count

    def exchange(self, index: int, part: Tensor) -> Sequence[Tensor]:
        """Return the parts of all ranks, by rank. Raises `threading.BrokenBarrierError` if a rank gave up."""
        self.parts[index] = part
        self._barrier.wait()
        parts = [part for part in self.parts if part is not None]
        self._barrier.wait()  # all have read the parts before one stores its next part
        return parts

    def give_up(self) -> None:
        """Make waiting and later threads raise until `renew`."""
        self._barrier.abort()

    def renew(self) -> None:
        """Allow meetings again after `give_up`. Call it while no thread is in `exchange`."""
        self._barrier.reset()


class ThreadCollective:
    """The `Collective` of one thread."""

    def __init__(self, index: int, count: int, meeting: Meeting) -> None:
        self.index = index
        self.count = count
        self.pending: deque[PendingSum] = deque()
        self._meeting = meeting

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        self.pending.clear()

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        parts = self._meeting.exchange(self.index, part)
        wide = torch.promote_types(torch.float32, part.dtype)
        total = parts[0].to(wide, copy=True)
        for other in parts[1:]:
            total += other.to(wide)
        if residual is not None:
            total += residual.to(wide)
        return total.to(part.dtype)

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        x = self.sum(part, residual)
        return x, norm(x)

    def pieces(self, tokens: int) -> Sequence[slice]:
        return [slice(0, tokens)]  # nothing overlaps

    def begin_sum(self, part: Tensor, residual: Tensor) -> PendingSum:
        residual.copy_(self.sum(part, residual))
        return FinishedSum(residual, self.pending)

    def gather(self, part: Tensor, width: int) -> Tensor:
        parts = self._meeting.exchange(self.index, part)
        return torch.cat(list(parts), dim=-1)[:, :width].contiguous()


class FinishedSum:
    """A `PendingSum` that is complete from the beginning."""

    def __init__(self, residual: Tensor, queue: deque[PendingSum]) -> None:
        self.tokens = len(residual)
        self._place = residual.data_ptr()
        self._queue = queue
        queue.append(self)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        if self._queue.popleft() is not self or residual.data_ptr() != self._place:
            raise RuntimeError("sums must be finished in the order in which they began, with the same residual")
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))

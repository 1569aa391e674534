"""Ranks that are threads of one process and share its memory: each leaves its part where the others find it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from aengine.kernels.collective.base import SumUnderWay
from aengine.kernels.linear.base import Norm


class Meeting:
    """Where so many threads meet. A thread that gives up breaks it: the others raise instead of waiting for ever."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self.parts: list[Tensor | None] = [None] * count

    def exchange(self, index: int, part: Tensor) -> Sequence[Tensor]:
        """The parts of all ranks, by rank. Raises `threading.BrokenBarrierError` where one has given up."""
        self.parts[index] = part
        self._barrier.wait()
        parts = [part for part in self.parts if part is not None]
        self._barrier.wait()  # all have looked before anyone leaves his next part
        return parts

    def give_up(self) -> None:
        """Let nobody wait any longer, until `renew`."""
        self._barrier.abort()

    def renew(self) -> None:
        """Meet again as if nobody had ever given up. To be called while no thread is within."""
        self._barrier.reset()


class ThreadCollective:
    """`Collective` of one such thread."""

    def __init__(self, index: int, count: int, meeting: Meeting) -> None:
        self.index = index
        self.count = count
        self.under_way: deque[SumUnderWay] = deque()
        self._meeting = meeting

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        self.under_way.clear()

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
        return [slice(0, tokens)]  # nothing is beside anything

    def begin_sum(self, part: Tensor, residual: Tensor) -> SumUnderWay:
        residual.copy_(self.sum(part, residual))
        return Summed(residual, self.under_way)

    def gather(self, part: Tensor, width: int) -> Tensor:
        parts = self._meeting.exchange(self.index, part)
        return torch.cat(list(parts), dim=-1)[:, :width].contiguous()


class Summed:
    """`SumUnderWay` that is complete from the beginning."""

    def __init__(self, residual: Tensor, queue: deque[SumUnderWay]) -> None:
        self.tokens = len(residual)
        self._place = residual.data_ptr()
        self._queue = queue
        queue.append(self)

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        if self._queue.popleft() is not self or residual.data_ptr() != self._place:
            raise RuntimeError("sums are finished in the order in which they were begun, where they were begun")
        if norm is not None and normed is not None:
            normed.copy_(norm(residual))

"""Ranks that are threads of one process and share its memory: each leaves its part where the others find it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
        self._meeting = meeting

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

    def sum_product(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor) -> Tensor:
        return self.sum(product(x), residual)

    def gather(self, part: Tensor, width: int) -> Tensor:
        parts = self._meeting.exchange(self.index, part)
        return torch.cat(list(parts), dim=-1)[:, :width].contiguous()

"""What a shard of a model asks of the ranks that hold its other shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aengine.kernels.linear.base import Norm


class SumUnderWay(Protocol):
    """A sum that was begun beside other work of this rank."""

    tokens: int

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        """The residual, the very one that it was begun with, becomes the sum; normed `norm` of it, where there is one.

        To be called in the order in which sums were begun, on the stream that goes on with them.
        """
        ...


class Collective(Protocol):
    """One rank's part in what all ranks compute together; each rank has one of its own.

    All ranks call the same methods in the same order with tensors of the same shapes and types, and each gets the same
    bits: sums are of float32 in the order of the ranks, whoever comes first. On a GPU every method enqueues only, so
    that a step can be captured into a CUDA graph; on a CPU it waits for the other ranks' threads.
    """

    index: int  # of this rank
    count: int  # of ranks
    under_way: deque[SumUnderWay]  # begun and not finished, the first of them first

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        """Forget what a step has left under way that failed. All ranks sum something before anything is begun.

        rehearsal: of what is captured next. halves: whether it may come in pieces.
        """
        ...

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` plus the sum over the ranks of their parts, each [tokens, width], rounded once: [tokens, width].

        part may be used up; residual, which is the same on every rank, as well.
        """
        ...

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """`sum`, and `norm` of it: [tokens, width] each."""
        ...

    def pieces(self, tokens: int) -> Sequence[slice]:
        """In which pieces so many tokens are best computed and summed: the one's sum beside the next one's products."""
        ...

    def begin_sum(self, part: Tensor, residual: Tensor) -> SumUnderWay:
        """`sum` of a piece, which others may be computed beside. Neither tensor changes hands before it is finished."""
        ...

    def gather(self, part: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side, by rank: [rows, n] each -> [rows, width], the last of them cut off.

        width is at most count * n. The result is contiguous.
        """
        ...

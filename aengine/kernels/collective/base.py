"""What a shard of a model asks of the ranks that hold its other shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from aengine.kernels.linear.base import Norm


class Collective(Protocol):
    """One rank's part in what all ranks compute together; each rank has one of its own.

    All ranks call the same methods in the same order with tensors of the same shapes and types, and each gets the same
    bits: sums are of float32 in the order of the ranks, whoever comes first. On a GPU every method enqueues only, so
    that a step can be captured into a CUDA graph; on a CPU it waits for the other ranks' threads.
    """

    index: int  # of this rank
    count: int  # of ranks

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual` plus the sum over the ranks of their parts, each [tokens, width], rounded once: [tokens, width].

        part may be used up; residual, which is the same on every rank, as well.
        """
        ...

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """`sum`, and `norm` of it: [tokens, width] each."""
        ...

    def sum_product(self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor) -> Tensor:
        """`sum(product(x), residual)`; of many tokens, the first are added up while the others are multiplied.

        product: [tokens, n] -> [tokens, width], each token by itself. x [tokens, n].
        """
        ...

    def gather(self, part: Tensor, width: int) -> Tensor:
        """The ranks' columns side by side, by rank: [rows, n] each -> [rows, width], the last of them cut off.

        width is at most count * n. The result is contiguous.
        """
        ...

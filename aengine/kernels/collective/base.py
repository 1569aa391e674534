"""The protocols of sums and gathers over the ranks of a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aengine.kernels.linear.base import Norm


class PendingSum(Protocol):
    """A sum that overlaps with other work of this rank."""

    tokens: int

    def finish(self, residual: Tensor, norm: Norm | None = None, normed: Tensor | None = None) -> None:
        """Write the sum to the residual, and `norm` of it to `normed` if there is a norm.

        The residual must be the one that the sum began with. Sums are finished in the order in which they began, on the
        stream that uses them next.
        """
        ...


class Collective(Protocol):
    """Sums and gathers over all ranks. Each rank has one object.

    All ranks call the same methods in the same order, with tensors of the same shapes and dtypes, and all get the same
    bits: sums are computed in float32 in the order of the ranks. On a GPU every method only enqueues work, so a step
    can be captured into a CUDA graph. On a CPU it waits for the other ranks' threads.
    """

    index: int  # number of this rank
    count: int  # number of ranks
    pending: deque[PendingSum]  # sums that have begun and are not finished, oldest first

    def begin_step(self, rehearsal: bool, halves: bool) -> None:
        """Drop sums that a failed step left pending. In each step all ranks call `sum` before `begin_sum`.

        rehearsal: whether the step rehearses a capture. halves: whether the step may be computed in two pieces.
        """
        ...

    def sum(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the residual plus the sum of all ranks' parts, [tokens, width], rounded once.

        The result may use the memory of part or residual. The residual is the same on every rank.
        """
        ...

    def sum_and_norm(self, part: Tensor, residual: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return `sum` and `norm` of it, [tokens, width] each."""
        ...

    def pieces(self, tokens: int) -> Sequence[slice]:
        """Return the pieces in which to compute these tokens. A piece's sum overlaps with the next piece's products."""
        ...

    def begin_sum(self, part: Tensor, residual: Tensor) -> PendingSum:
        """Begin the `sum` of a piece. Until it is finished, the caller must not use or free either tensor."""
        ...

    def gather(self, part: Tensor, width: int) -> Tensor:
        """Return the ranks' parts [rows, n] side by side in the order of the ranks, cut to `width` columns.

        width is at most count * n. The result [rows, width] is contiguous.
        """
        ...

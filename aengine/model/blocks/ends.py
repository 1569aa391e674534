"""Where a block takes from the residual stream, and how its part comes back onto it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from aengine.kernels.linear.base import Linear, Norm
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.sharded import Sum


@dataclass(frozen=True, slots=True)
class Addition:
    """What a block gives, summed over ranks where there are several, normed where there is a norm, times a scale, and
    added.
    """

    total: Sum | None
    norm: Norm | None
    scale: float

    @classmethod
    def after(cls, make: Parameters, layer: str, norm: str | None, hidden: int, eps: float, scale: float) -> Self:
        """norm: its name in the layer."""
        # Made in this order: a sum prepares the norm that is made next, which is of the sum itself or of x behind it.
        total = make.sum(prepares=norm is not None or scale == 1.0)
        return cls(total, make.optional_norm(layer, norm, hidden, eps), scale)

    @property
    def plain(self) -> bool:
        """Whether it is nothing but a sum."""
        return self.norm is None and self.scale == 1.0

    @property
    def fused(self) -> bool:
        """Whether the product in front of it can add to x itself."""
        return self.plain and self.total is None

    def behind(self, out: Linear, read: Tensor, x: Tensor, step: Step | None) -> Tensor:
        """x, and on top of it `out` of what its tokens have read, which may both be used up.

        step: where no block behind this one reads: of the tokens only those go on that something is drawn from.
        """
        if step is not None:
            read, x = step.narrow(read, x)
            if not len(x):
                return x
        if self.fused:
            return out.apply(read, residual=x)
        return self.of(lambda rows: out.apply(read[rows]), x)

    def of(self, part: Callable[[slice], Tensor], x: Tensor) -> Tensor:
        """x [tokens, hidden], which may be used up, and on top of it what the block gives for these tokens.

        part: of some of them, which may be used up as well.
        """
        if self.plain and self.total is not None:
            return self.total.of(part, x)
        whole = part(slice(None))
        if self.total is not None:
            whole = self.total(whole)
        if self.norm is not None and self.scale == 1.0:
            return self.norm.add_to(whole, x)
        return x.add_(whole if self.norm is None else self.norm(whole), alpha=self.scale)

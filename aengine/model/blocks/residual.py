"""Adds a block's result to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from aengine.kernels.linear.base import Linear, Norm
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.step import Step
from aengine.model.ranks.sharded import Sum
from aengine.model.spec.layer import NormSpec


@dataclass(frozen=True, slots=True)
class Addition:
    """Adds a block's result to the residual stream.

    The result is summed over ranks, then normed, then scaled, then added. Each step but the last is optional.
    """

    total: Sum | None
    norm: Norm | None
    scale: float

    @classmethod
    def of_block(cls, build: BuildContext, name: str, norm: NormSpec | None, scale: float) -> Self:
        """name: the layer's name in checkpoints; norm: of the block's result."""
        # The order matters: a sum also computes the norm that is made next, which is this block's or the next block's.
        total = build.make.sum(prepares=norm is not None or scale == 1.0)
        return cls(total, build.make.layer_norm(name, norm, build.hidden), scale)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a norm nor a scale."""
        return self.norm is None and self.scale == 1.0

    @property
    def is_fused(self) -> bool:
        """Whether the block's last product can add to x itself."""
        return self.is_plain and self.total is None

    def project_and_add(self, out: Linear, attended: Tensor, x: Tensor, step: Step | None) -> Tensor:
        """Add `out(attended)` to x. Both may be overwritten.

        step: only the last block that attends passes it. Later blocks get only the step's wanted tokens.
        """
        if step is not None:
            attended, x = step.narrow(attended, x)
            if not len(x):
                return x
        if self.is_fused:
            return out.apply(attended, residual=x)
        return self.add_result(lambda rows: out.apply(attended[rows]), x)

    def add_result(self, result: Callable[[slice], Tensor], x: Tensor) -> Tensor:
        """Add the block's result to x [tokens, hidden], which may be overwritten.

        result: returns the block's result for some of the tokens. It may be overwritten.
        """
        if self.is_plain and self.total is not None:
            return self.total.add_result(result, x)
        added = result(slice(None))
        if self.total is not None:
            added = self.total(added)
        if self.norm is not None and self.scale == 1.0:
            return self.norm.add_to(added, x)
        return x.add_(added if self.norm is None else self.norm(added), alpha=self.scale)

"""Where a block takes from the residual stream, and how its part comes back onto it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aengine.kernels.linear.base import Linear, Norm


def taken(linear: Linear, norm: Norm | None, x: Tensor) -> Tensor:
    """`linear` of x, normed where there is a norm."""
    if norm is None:
        return linear(x)
    # Products take a norm along only where its weight is of their rows' dtype.
    return linear.after(norm, x) if norm.weight.dtype == x.dtype else linear(norm(x))


@dataclass(frozen=True, slots=True)
class Addition:
    """What a block gives, normed where there is a norm, times a scale, and added."""

    norm: Norm | None
    scale: float

    @property
    def plain(self) -> bool:
        """Whether it is nothing but a sum, which the product in front of it can make as well."""
        return self.norm is None and self.scale == 1.0

    def of(self, linear: Linear, inner: Tensor, x: Tensor) -> Tensor:
        """x + the part that `linear` makes of inner."""
        return linear.add_to(inner, x) if self.plain else self(linear(inner), x)

    def __call__(self, part: Tensor, x: Tensor) -> Tensor:
        """part, x [tokens, hidden], both of which may be used up -> [tokens, hidden]."""
        return x.add_(part if self.norm is None else self.norm(part), alpha=self.scale)

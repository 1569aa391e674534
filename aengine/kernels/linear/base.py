"""Linears and norms as the decoder's blocks call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor


class Norm(Protocol):
    """A norm over the last axis. The scale is computed in float32.

    An RMS norm applies the weight in x's dtype. Products and sums may compute it themselves, but no other norm.
    """

    weight: Tensor  # [width]
    eps: float

    @property
    def is_rms(self) -> bool: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, width] -> [tokens, width]."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return residual + self(x), both [tokens, width]. The contiguous residual's memory may be used for it."""
        ...


class Linear(Protocol):
    """y = W x + b. It owns the weight, in whatever format the weight is stored.

    Both methods only enqueue work: no host sync, and no shape that depends on a tensor's values. So a step can be
    captured into a CUDA graph.
    """

    inputs: int
    outputs: int

    def apply(
        self, x: Tensor, *, norm: Norm | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        """Return W f(x) + b + residual, [tokens, outputs] in x's dtype, in as few kernels as are fastest.

        x: [tokens, inputs], or [tokens, 2 * inputs] if `gated`.
        norm: f is this norm. Not together with `gated`.
        gated: f is SiLU(gate) * up; x holds gate, then up.
        residual: [tokens, outputs], contiguous. Its memory may be used for the result.
        """
        ...

    def apply_activated(self, x: Tensor, norm: Norm | None = None) -> Tensor | None:
        """Return SiLU(gate) * up of the outputs, gate first: [tokens, outputs / 2]. x, norm: as in `apply`.

        None if it is faster to leave the activation to the product that follows.
        """
        ...


@runtime_checkable
class Registered(Protocol):
    """An object made of a weight that a checkpoint holds."""

    @property
    def parameters(self) -> Mapping[str, object]:
        """Everything that was made of the weight, by name. A reload overwrites tensors and keeps constants.

        A value may also be another `Registered`, a dataclass, or a list of such values. Scratch memory of a product is
        left out, as is what other objects register.
        """
        ...


class RegisteredLinear(Linear, Registered, Protocol):
    """A linear that owns its weight."""

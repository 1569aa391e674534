"""Biases and activations of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GateClamp:
    """min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, -limit, limit) + 1)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRule:
    """What experts compute besides their two products.

    Args:
        clamp: None means SiLU(gate) * up.
        biases: of gate and up, [experts, parts * inter], gate's first, and of down, [experts, hidden]. They may be
            filled later.
        gelu: GELU instead of SiLU, by its approximation with a hyperbolic tangent.
        gated: False: there is no gate, and the square of ReLU is between the products. Then `clamp` and `gelu` are not
            used.
    """

    clamp: GateClamp | None = None
    biases: tuple[Tensor, Tensor] | None = None
    gelu: bool = False
    gated: bool = True

    @property
    def parts(self) -> int:
        """The matrices of the first product: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def plain(self) -> bool:
        """Whether an activation is all that is between the products."""
        return self.clamp is None and self.biases is None

    @property
    def gate_up(self) -> dict[str, float | bool]:
        """Compile-time constants of the kernels of gate and up."""
        alpha, limit = (0.0, 0.0) if self.clamp is None else (self.clamp.alpha, self.clamp.limit)
        return {"ALPHA": alpha, "LIMIT": limit, "GELU": self.gelu, **self.down}

    @property
    def down(self) -> dict[str, bool]:
        """Compile-time constants of the kernels of down."""
        return {"BIASES": self.biases is not None}

    def pointers(self, otherwise: Tensor) -> tuple[Tensor, Tensor]:
        """Return the biases of both products, or `otherwise` twice if there are none."""
        return (otherwise, otherwise) if self.biases is None else self.biases


SILU = ExpertRule()

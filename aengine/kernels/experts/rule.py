"""What experts of some models compute beside their two products and the SiLU between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GateClamp:
    """min(gate, limit) * sigmoid(alpha * that) * (up, within the limit on both sides, + 1)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRule:
    """clamp: None: SiLU(gate) * up. biases: of gate and up, [experts, 2 * inter], gate's first, and of down,
    [experts, hidden], which may be filled later; None: there are none. gelu: GELU instead of SiLU, by its
    approximation with a hyperbolic tangent."""

    clamp: GateClamp | None = None
    biases: tuple[Tensor, Tensor] | None = None
    gelu: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing but an activation lies between the products."""
        return self.clamp is None and self.biases is None

    @property
    def gate_up(self) -> dict[str, float | bool]:
        """What the kernel of gate and up knows of it when it is compiled."""
        alpha, limit = (0.0, 0.0) if self.clamp is None else (self.clamp.alpha, self.clamp.limit)
        return {"ALPHA": alpha, "LIMIT": limit, "GELU": self.gelu, **self.down}

    @property
    def down(self) -> dict[str, bool]:
        """What the kernel of down knows of it when it is compiled."""
        return {"BIASES": self.biases is not None}

    def pointers(self, otherwise: Tensor) -> tuple[Tensor, Tensor]:
        """The biases of both products; any tensor instead where there are none."""
        return (otherwise, otherwise) if self.biases is None else self.biases


SILU = ExpertRule()

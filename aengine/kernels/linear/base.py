"""What a block of the decoder asks of a product with a weight matrix, whatever format the matrix is stored in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Norm(Protocol):
    """An RMS norm over the last axis: the mean square and the scale in float32, the weight applied in x's dtype."""

    weight: Tensor  # [width]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, width] -> [tokens, width]."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`, both [tokens, width]; the residual, which is contiguous, may be used up."""
        ...


class Linear(Protocol):
    """y = x W^T + b. It owns its weight and the weight's format; nobody else looks at either.

    Every method enqueues only: no host sync, and no shape that depends on a tensor's values, so that a step can be
    captured into a CUDA graph.
    """

    inputs: int
    outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] -> [tokens, outputs], in x's dtype."""
        ...

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        """`residual + self(x)`: x [tokens, inputs], residual [tokens, outputs], which may be used up."""
        ...

    def add_gated_to(self, gate_up: Tensor, residual: Tensor) -> Tensor:
        """`add_to` of SiLU(gate) * up: gate_up [tokens, 2 * inputs], gate first, residual [tokens, outputs]."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """`self` of SiLU(gate) * up: gate_up [tokens, 2 * inputs], gate first -> [tokens, outputs]."""
        ...

    def after(self, norm: Norm, x: Tensor) -> Tensor:
        """`self(norm(x))`: x [tokens, inputs] -> [tokens, outputs]; one kernel where that is faster."""
        ...

    def activated(self, norm: Norm | None, x: Tensor) -> Tensor | None:
        """SiLU(gate) * up of the outputs, gate first, behind a norm if there is one: [tokens, outputs / 2].

        None where that is not faster than leaving it to the product that follows.
        """
        ...

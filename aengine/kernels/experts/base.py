"""What a block of the decoder asks of a mixture of experts, whatever format their matrices are stored in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from aengine.kernels.linear.base import Registered


class Experts(Protocol):
    """down(activation(gate(h)) * up(h)) of each of a token's experts, weighted and summed. They own their weights."""

    @property
    def hidden(self) -> int: ...

    @property
    def experts(self) -> int:
        """How many there are."""
        ...

    def add_to(self, h: Tensor, ids: Tensor, weights: Tensor, residual: Tensor | None) -> Tensor:
        """residual + the sum over j of weights[t, j] * the expert ids[t, j] of h: [tokens, hidden].

        h [tokens, hidden]; ids int32 [tokens, k]: one outside of 0..experts-1 adds nothing; weights float32
        [tokens, k]; residual [tokens, hidden], which may be used up, None: nothing. Summed by j in float32. Enqueues
        only on a GPU.
        """
        ...


class RegisteredExperts(Experts, Registered, Protocol):
    """Experts that own their weights."""

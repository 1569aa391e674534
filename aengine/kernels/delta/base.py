"""Gated delta nets: their heads, their weights, and the computation between the projections of a layer.

Every value head has a state matrix S [key_dim, value_dim]. A token decays S by the factor exp(g). It corrects S,
weighted by beta, so that S returns the token's value for its key. Then it reads S with its query:

    S = exp(g) * S;  S = S + k (beta * (v - S^T k))^T;  o = S^T q
    g = -exp(a_log) * softplus(a + dt_bias);  beta = sigmoid(b)

q, k and v first pass a causal convolution of each channel and SiLU. q and k are normalised to length 1, and q is
divided by sqrt(key_dim). The output is weight * rms_norm(o) * silu(z).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch


@dataclass(slots=True)
class DeltaWeights:
    """The tensors of a layer between its projections. They may be filled later."""

    heads: RecurrentHeads
    conv: Tensor  # [channels, width], of q, then k, then v: the last column is for the token itself
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    norm: Tensor  # [value_dim]
    eps: float


class DeltaNet(Protocol):
    """The part of a layer between its projections: convolution, gates, recurrence and norm."""

    def __call__(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, state: RecurrentState, batch: StateBatch
    ) -> Tensor:
        """Return [tokens, values], and update the state in place.

        qkv [tokens, channels], z [tokens, values], b and a [tokens, value_heads] have one dtype. Each of their rows is
        contiguous; rows need not be adjacent.
        """
        ...

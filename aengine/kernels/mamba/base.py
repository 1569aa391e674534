"""Mamba2: its heads, its weights, and the computation between the projections of a layer.

Every head has a state matrix S [key_dim, value_dim]. A token fades it by the factor exp(g) and adds its input x,
weighted by its step and spread by b. Then it reads S with c:

    S = exp(g) * S + b (step * x)^T;  o = S^T c + skip * x
    step = softplus(dt + dt_bias);  g = -exp(a_log) * step

x, b and c first pass a causal convolution of each channel and SiLU. Heads of a group share b and c. The output is
o * silu(z). In the terms of `RecurrentState`, b is the key of a group, and step * x the correction of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aengine.kernels.recurrent.state import RecurrentHeads, RecurrentState, StateBatch


@dataclass(slots=True)
class MambaWeights:
    """The tensors of a layer between its projections. They may be filled later."""

    heads: RecurrentHeads  # key heads are groups
    conv: Tensor  # [channels, width], of x, then b, then c: the last column is for the token itself
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # [value_heads]
    dt_bias: Tensor  # [value_heads]
    skip: Tensor  # [value_heads]


class Mamba(Protocol):
    """The part of a layer between its projections: convolution, gates and recurrence."""

    def __call__(self, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        """Return [tokens, values], and update the state in place.

        xbc [tokens, channels], z [tokens, values] and dt [tokens, value_heads] have one dtype. Each of their rows is
        contiguous; rows need not be adjacent.

        Raises ValueError if rows have drafts and the states have no memory for them.
        """
        ...

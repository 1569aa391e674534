"""Mamba2: its heads, its weights, and the computation between the projections of a layer.

Every head has a state matrix S [state_dim, head_dim]. A token fades it by the factor exp(g) and adds its input x,
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

from aengine.kernels.recurrent.state import RecurrentState, StateBatch


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Head h reads b and c of group h // (heads / groups)."""

    groups: int
    heads: int
    state_dim: int
    head_dim: int

    @property
    def keys(self) -> int:
        """The width of b of all groups, and of c."""
        return self.groups * self.state_dim

    @property
    def values(self) -> int:
        """The width of x of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: x, then b, then c."""
        return self.values + 2 * self.keys

    @property
    def projected(self) -> tuple[int, int, int, int, int]:
        """The widths of z, x, b, c and dt of a token."""
        return self.values, self.values, self.keys, self.keys, self.heads


@dataclass(slots=True)
class MambaWeights:
    """The tensors of a layer between its projections. They may be filled later."""

    heads: MambaHeads
    conv: Tensor  # [channels, width]: the last column is for the token itself
    conv_bias: Tensor | None  # [channels]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    skip: Tensor  # [heads]


class Mamba(Protocol):
    """The part of a layer between its projections: convolution, gates and recurrence."""

    def __call__(self, xbc: Tensor, z: Tensor, dt: Tensor, state: RecurrentState, batch: StateBatch) -> Tensor:
        """Return [tokens, values], and update the state in place.

        xbc [tokens, channels], z [tokens, values] and dt [tokens, heads] have one dtype. Each of their rows is
        contiguous; rows need not be adjacent.

        Raises ValueError if rows have drafts and the states have no memory for them.
        """
        ...

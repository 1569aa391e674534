"""The specification of recurrent layers as data: layers with a state of fixed size for each sequence."""

from __future__ import annotations

import msgspec

from aengine.kernels.recurrent.state import RecurrentHeads
from aengine.model.ranks.shard import Shard


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """A gated delta net: linear attention with a state of fixed size for each sequence."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int  # width of each channel's convolution in tokens
    # Whether checkpoints have one matrix for q, k, v, z and one for b, a, ordered by key head.
    interleaved: bool = False

    @property
    def heads(self) -> RecurrentHeads:
        return RecurrentHeads(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    @property
    def _projected(self) -> int:
        """The width of q, k, v, z, b and a of a token together."""
        return self.heads.channels + self.heads.values + 2 * self.value_heads

    def indivisible(self, ranks: int) -> str:
        """Return a description of a part that cannot be divided evenly among this many ranks. Empty: all can be."""
        return f"{self.key_heads} key heads of linear attention" if self.key_heads % ranks else ""

    def state_shape(self, ranks: int) -> tuple[int, tuple[int, int, int]]:
        """Return the channels of the convolution's state, and the shape of the recurrent state, on each rank."""
        return self.heads.channels // ranks, (self.value_heads // ranks, self.key_dim, self.value_dim)

    def parameters(self, hidden: int) -> int:
        between = self.heads.channels * self.conv + 2 * self.value_heads + self.value_dim
        return (self._projected + self.heads.values) * hidden + between

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        return (self._projected // ranks, hidden), (hidden, self.heads.values // ranks)


class ConvSpec(msgspec.Struct, frozen=True, kw_only=True, tag="conv"):
    """A gated short convolution: out(c * conv(b * x)), of projections b, c and x. Its state is its last inputs."""

    channels: int
    conv: int  # width of each channel's convolution in tokens
    bias: bool = False  # of all projections and of the convolution

    def indivisible(self, ranks: int) -> str:
        """Return a description of a part that cannot be divided evenly among this many ranks. Empty: all can be."""
        return f"{self.channels} channels of a convolution" if self.channels % ranks else ""

    def state_shape(self, ranks: int) -> tuple[int, tuple[int, int, int]]:
        """Return the channels of the convolution's state, and the shape of the recurrent state, on each rank."""
        return self.channels // ranks, (0, 1, 1)

    def parameters(self, hidden: int) -> int:
        biases = (4 * self.channels + hidden) * self.bias
        return 4 * self.channels * hidden + self.channels * self.conv + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        return (3 * self.channels // ranks, hidden), (hidden, self.channels // ranks)


class MambaSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mamba"):
    """Mamba2: a convolution, and a state that every token fades and adds to."""

    groups: int  # heads of a group share keys, which spread inputs over the state, and queries, which read it
    heads: int
    state_dim: int
    head_dim: int
    conv: int  # width of each channel's convolution in tokens
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm: bool = True  # whether each group's results have an RMS norm after their gates
    # Of the projection's parts: gates, inputs, keys, queries and steps. Empty: there are none.
    factors: tuple[float, ...] = ()
    block: str = "mamba"  # name in checkpoints

    def rank_heads(self, ranks: int = 1) -> RecurrentHeads:
        """Return the heads on each rank. If there are fewer groups than ranks, several ranks have the same group."""
        units = Shard(count=ranks).units
        return RecurrentHeads(units(self.groups), units(self.heads), self.state_dim, self.head_dim)

    def projected(self, ranks: int = 1) -> tuple[int, int, int, int, int]:
        """Return the widths of z, x, b, c and dt of a token, on each rank."""
        heads = self.rank_heads(ranks)
        return heads.values, heads.values, heads.keys, heads.keys, heads.value_heads

    def indivisible(self, ranks: int) -> str:
        """Return a description of a part that cannot be divided evenly among this many ranks. Empty: all can be."""
        if self.heads % ranks:
            return f"{self.heads} Mamba heads"
        return f"{self.groups} groups of Mamba heads" if self.groups > 1 and self.groups % ranks else ""

    def state_shape(self, ranks: int) -> tuple[int, tuple[int, int, int]]:
        """Return the channels of the convolution's state, and the shape of the recurrent state, on each rank."""
        heads = self.rank_heads(ranks)
        return heads.channels, (heads.value_heads, self.state_dim, self.head_dim)

    def parameters(self, hidden: int) -> int:
        heads = self.rank_heads()
        between = heads.channels * (self.conv + self.conv_bias) + 3 * self.heads + heads.values * self.norm
        projected = sum(self.projected())
        biases = projected * self.in_bias + hidden * self.out_bias
        return (projected + heads.values) * hidden + between + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        return (sum(self.projected(ranks)), hidden), (hidden, self.rank_heads(ranks).values)


RecurrentSpec = DeltaSpec | ConvSpec | MambaSpec

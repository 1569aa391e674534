"""The specification of attention as data, and sizes that follow from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from aengine.cache.kv import KVLayer
from aengine.model.ranks.shard import Shard
from aengine.model.rope import QueryGrowth, RopeConfig

# "head": a norm over each query or key head. "all": a norm over all query heads, and one over all key heads.
# "centred": a LayerNorm over each head, with a weight for each head.
QKNorm = Literal["none", "head", "all", "centred"]


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Causal self-attention with grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: QKNorm = "none"  # norms before the rotation; RMS norms, unless they are centred
    qk_norm_offset: float = 0.0  # is added to the weights of these norms
    qk_norm_weight: bool = True  # whether the norms of single heads have weights
    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False  # whether checkpoints have q, k and v in one tensor
    rope: RopeConfig | None = RopeConfig()  # None: no rotation
    interleaved: bool = False  # whether neighbouring dimensions are rotated as pairs, instead of pairs from both halves
    growth: QueryGrowth | None = None  # of queries, after the rotation
    scale: float | None = None  # factor of attention scores; None: head_dim ** -0.5
    softcap: float | None = None  # cap of attention scores
    sinks: bool = False  # whether each head has one more score, of a key whose value is zero
    window: int | None = None  # positions that a query sees, its own included; None: all
    # Whether positions are cut into chunks as long as the window. A query sees those of its own chunk, up to its own.
    chunked: bool = False
    gate: bool = False  # whether the sigmoid of a gate multiplies the output of each query head
    gate_proj: bool = False  # whether gates have a separate projection; else each gate follows its head in q_proj
    v_norm: bool = False  # whether each value head has an RMS norm without a weight
    keys_are_values: bool = False  # whether values are the keys before their norm and rotation
    value_dim: int | None = None  # of value heads, if they are narrower than keys. The KV pool has zeros after them.
    value_scale: float = 1.0  # multiplies narrower values
    shares_kv_of: int | None = None  # the layer whose keys and values this layer reads; None: its own
    # Names in checkpoints.
    block: str = "self_attn"
    fused_name: str = "qkv_proj"
    out: str = "o_proj"
    norms: tuple[str, str] = ("q_norm", "k_norm")

    @property
    def masked_window(self) -> int | None:
        """The window that kernels apply. Chunks need none, because they are sequences of their own."""
        return None if self.chunked else self.window

    def chunk_within(self, positions: int) -> int | None:
        """Return the positions of a chunk, or None if a context of so many positions is not cut."""
        return self.window if self.chunked and positions > (self.window or positions) else None

    def kv_layer(self, ranks: int) -> KVLayer:
        """Return the shape of a token's entry in the KV pool, on each rank."""
        return KVLayer(Shard(count=ranks).units(self.kv_heads), self.head_dim)

    @property
    def projected(self) -> int:
        """The number of projections besides queries: 2 (keys and values), 1 (keys) or 0."""
        return 0 if self.shares_kv_of is not None else 1 if self.keys_are_values else 2

    @property
    def gates_follow_heads(self) -> bool:
        """Whether each query head in the projection is followed by its gate."""
        return self.gate and not self.gate_proj

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together."""
        return self.kv_heads * self.head_dim

    @property
    def attended(self) -> int:
        """The width of the results of all query heads together."""
        return self.heads * (self.value_dim or self.head_dim)

    def parameters(self, hidden: int) -> int:
        projection = self._projected(self.heads, self.kv_heads)
        kept = self.shares_kv_of is None
        head = (1 + kept) * self.head_dim * self.qk_norm_weight
        wide = self.queries + kept * self.keys
        norms = {"none": 0, "head": head, "all": wide, "centred": wide}[self.qk_norm]
        biases = projection * self.qkv_bias + hidden * self.out_bias + self.heads * self.sinks
        return (projection + self.attended) * hidden + norms + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        heads, kv_heads = Shard(count=ranks).units(self.heads), Shard(count=ranks).units(self.kv_heads)
        return (self._projected(heads, kv_heads), hidden), (hidden, heads * (self.value_dim or self.head_dim))

    def _projected(self, heads: int, kv_heads: int) -> int:
        """Return the width of the projection to so many heads."""
        widths = self.head_dim, self.value_dim or self.head_dim
        return (1 + self.gate) * heads * self.head_dim + kv_heads * sum(widths[: self.projected])


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Causal self-attention over latents (MLA): all heads derive keys and values from one vector per token."""

    heads: int
    unrotated: int  # dimensions of a key that are computed from the latent
    rotated: int  # all other dimensions of a key; they are rotated, shared by all heads, and stored next to the latent
    value_dim: int
    rank: int  # the width of the latent
    query_rank: int  # the width of the queries' latent; 0: queries have one projection
    bias: bool = False  # of the first and the last projection
    rope: RopeConfig = RopeConfig()
    interleaved: bool = True  # whether neighbouring dimensions are rotated as pairs, instead of pairs from both halves
    scale: float  # factor of attention scores
    window: None = None
    shares_kv_of: None = None

    @property
    def key_dim(self) -> int:
        return self.unrotated + self.rotated

    @property
    def latent(self) -> int:
        """The width of a token's entry in the KV pool."""
        return self.rank + self.rotated

    @property
    def head_dim(self) -> int:
        """The width of a query and a key as attention reads them."""
        return self.latent

    @property
    def queries(self) -> int:
        """The width of all queries together."""
        return self.heads * self.latent

    @property
    def values(self) -> int:
        """The width of the values of all heads together."""
        return self.heads * self.value_dim

    def kv_layer(self, ranks: int) -> KVLayer:
        """Return the shape of a token's entry in the KV pool. All ranks store the same."""
        return KVLayer(1, self.latent, vectors=1)

    @property
    def absorbed(self) -> int:
        """The number of weights of kv_b_proj, which makes K and V from latents. They stay in the model's dtype."""
        return self.heads * (self.unrotated + self.value_dim) * self.rank

    def parameters(self, hidden: int) -> int:
        first = self.query_rank + self.latent
        biases = (first + hidden) * self.bias
        return sum(n * k for n, k in self.linears(hidden)) + self.absorbed + self.query_rank + self.rank + biases

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each matrix product, on each rank."""
        heads = Shard(count=ranks).units(self.heads)
        return (
            (self.query_rank + self.latent, hidden),
            (heads * self.key_dim, self.query_rank or hidden),
            (hidden, heads * self.value_dim),
        )

"""A decoder as data: what its layers are made of, and what follows from that."""

from __future__ import annotations

from typing import Literal

import msgspec


class AttentionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Causal self-attention with grouped queries."""

    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: Literal["none", "head"] = "none"  # RMS norm of each q and k head before the rotation
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None  # how many positions, its own included, a query sees; None: all before it

    @property
    def queries(self) -> int:
        """The width of all query heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads, which is that of all value heads."""
        return self.kv_heads * self.head_dim

    def parameters(self, hidden: int) -> int:
        projection = self.queries + 2 * self.keys
        norms = 2 * self.head_dim if self.qk_norm == "head" else 0
        biases = projection * self.qkv_bias + hidden * self.out_bias
        return (projection + self.queries) * hidden + norms + biases


class MLPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """down(silu(gate) * up)."""

    inner: int
    bias: bool = False

    def parameters(self, hidden: int) -> int:
        return 3 * hidden * self.inner + (2 * self.inner + hidden) * self.bias


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Attention, then a feed-forward part, each behind a norm of its own."""

    attention: AttentionSpec
    ffn: MLPSpec

    def parameters(self, hidden: int) -> int:
        return self.attention.parameters(hidden) + self.ffn.parameters(hidden) + 2 * hidden

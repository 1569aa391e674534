"""The heads of a recurrent layer whose state of a sequence is one matrix for each head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecurrentHeads:
    """Value head h reads key head h // (value_heads / key_heads), and has a state [key_dim, value_dim]."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def keys(self) -> int:
        """The width of all key heads, and of all query heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The width of all value heads."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution, which queries, keys and values pass."""
        return 2 * self.keys + self.values

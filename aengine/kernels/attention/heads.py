"""Describes the heads of a projection, and how a layer changes attention scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """The query heads of a projection, and the norms of heads before the rotation.

    The shape of the cache gives the number of KV heads.
    """

    count: int  # of query heads
    q_norm: Tensor | None = None  # [dim]
    k_norm: Tensor | None = None  # [dim]; None if q_norm is None or the projection has no keys
    eps: float = 0.0
    gated: bool = False  # a gate follows each query head in the projection, and is skipped
    v_norm: bool = False  # whether values are normed, without a weight
    interleaved: bool = False  # rotated pairs are neighbours; else their distance is half of the rotated elements
    # What follows the queries in the projection. "keys": keys only; before norm and rotation they are the values, too.
    # "nothing": neither, and nothing is written to the cache.
    kv: Literal["both", "keys", "nothing"] = "both"


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The norm of latents, and which elements are rotated.

    A latent has `rank` elements, which are normed, and then `rotated` ones. The last `rotated` elements of each query
    head are rotated.
    """

    weight: Tensor  # [rank]
    eps: float
    rotated: int
    interleaved: bool  # rotated pairs are neighbours; else their distance is rotated / 2

    @property
    def rank(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a layer changes scores, apart from scaling them."""

    softcap: float | None = None  # c: a score s becomes c * tanh(s / c)
    sinks: Tensor | None = None  # [heads] float32: one more score in each head's softmax, with a value of zero

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


PLAIN = Scores()

"""How attention heads are arranged in a projection, and what a layer does with scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """The query heads of a projection, and the norms of heads before the rotation.

    The cache says how many KV heads there are.
    """

    count: int  # of query heads
    q_norm: Tensor | None = None  # [dim]; both norms or neither, but without keys only this one
    k_norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False  # a gate follows each query head in the projection, and is skipped
    v_norm: bool = False  # whether values have a norm without a weight
    # What follows the queries in the projection: keys and values; keys, which are also the values before norm and
    # rotation; or nothing, and then nothing is written to the cache.
    kv: Literal["both", "keys", "nothing"] = "both"


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The norm of latents, and which elements are rotated.

    A latent has `rank` elements, which are normed, and then `rotated` ones. Of each query head the last `rotated` ones
    are rotated.
    """

    weight: Tensor  # [rank]
    eps: float
    rotated: int
    interleaved: bool  # pairs are neighbours; else elements that are half of `rotated` apart

    @property
    def rank(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """How a layer changes scores, apart from scaling them."""

    softcap: float | None = None  # c: a score s becomes c * tanh(s / c)
    sinks: Tensor | None = None  # [heads] float32: a further score of each head's queries, whose value is zero

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


PLAIN = Scores()

"""How attention heads lie in a projection, and what a layer does with scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, and the norm that each head of queries and keys has before the rotation."""

    count: int  # of queries; those of keys and values are as many as the cache has
    q_norm: Tensor | None = None  # [dim], both or neither; where there are no keys, there is none of theirs
    k_norm: Tensor | None = None
    eps: float = 0.0
    gated: bool = False  # each query head of the projection is followed by a gate, which is left where it is
    v_norm: bool = False  # whether values are normed as well, without a weight
    # What the projection has behind the queries: keys and values; keys, which are values before norm and rotation as
    # well; or nothing, and nothing is written.
    behind: Literal["both", "keys", "nothing"] = "both"


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """weight [rank]: of the norm of latents. rotated: numbers behind the first `rank` of a latent, and at the end of
    each query head, that are turned; interleaved: neighbours are pairs, else those half of `rotated` apart."""

    weight: Tensor
    eps: float
    rotated: int
    interleaved: bool

    @property
    def rank(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """softcap c: a score s becomes c * tanh(s / c). sinks [heads] float32: one more score of each head's queries, that
    of a key whose value is zero; nothing is done to it. None: there is no such thing."""

    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


PLAIN = Scores()

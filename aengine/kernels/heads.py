"""How the projection of an attention block is cut into heads."""

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

"""A step as the blocks of a decoder see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.kernels.collective.base import Collective
from aengine.kernels.delta.base import StateBatch
from aengine.kernels.lora.base import TokenAdapters


@dataclass(slots=True)
class States:
    """The states of recurrent layers, and which of them belong to the step's sequences."""

    pool: StatePool
    batch: StateBatch


@dataclass(slots=True)
class Step:
    """The tokens of a step, the caches that they read, and which of them are wanted in the end."""

    positions: Tensor  # [tokens] int64
    batch: AttentionBatch
    kv: KVPool
    wanted: Tensor | None  # [n] int64: the tokens that go on after the last attention. None means all.
    sums: Tensor | None  # [tokens] float32, filled after the last attention: finite if the token's K and V are
    ranks: Collective | None  # the ranks that hold the other heads. None means one rank.
    tokens: TokenAdapters | None  # the adapter of each token. None: the model has no room for adapters.
    states: States | None = None  # None: no layer is recurrent
    inputs: Tensor | None = None  # [tokens, layers, width]: a second embedding, if the model has one

    def slots(self, tokens: int) -> Tensor:
        """Return the slots of the remaining tokens, [tokens] int64. Those of padding are inside page 0."""
        slots = self.batch.slots
        return slots if self.wanted is None or len(slots) == tokens else slots.index_select(0, self.wanted)

    def pieces(self, tokens: int) -> Sequence[slice]:
        """Return the pieces in which the ranks compute this many tokens before attention."""
        return [slice(0, tokens)] if self.ranks is None else self.ranks.pieces(tokens)

    def narrow(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the wanted tokens only. Called after the last attention: no later layer reads the others.

        attended [tokens, width] and x [tokens, hidden] -> the same for the wanted tokens.
        """
        if self.sums is not None:
            torch.sum(attended, dim=-1, dtype=torch.float32, out=self.sums)
            if self.ranks is not None:
                of_all = self.ranks.gather(self.sums.unsqueeze(-1), self.ranks.count)  # [tokens, ranks]
                torch.sum(of_all, dim=-1, out=self.sums)
        if self.wanted is None:
            return attended, x
        if self.tokens is not None and self.tokens.places is not None:
            self.tokens.places = self.tokens.places.index_select(0, self.wanted)
        if self.inputs is not None:
            self.inputs = self.inputs.index_select(0, self.wanted)
        return attended.index_select(0, self.wanted), x.index_select(0, self.wanted)


class Block(Protocol):
    """A part of a decoder that reads the residual stream and adds to it."""

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden], which may be overwritten -> [tokens, hidden].

        The last block that attends returns the wanted tokens alone.
        """
        ...

"""What the blocks of a decoder share in one pass over the tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from aengine.attention.base import AttentionBackend, AttentionBatch
from aengine.cache.kv import KVPool
from aengine.cache.states import StatePool
from aengine.kernels.collective.base import Collective
from aengine.kernels.delta.base import StateBatch
from aengine.kernels.lora.base import TokenAdapters


@dataclass(slots=True)
class States:
    """What recurrent layers keep, and which of it the step's sequences have."""

    pool: StatePool
    batch: StateBatch


@dataclass(slots=True)
class Step:
    """The tokens of a step, what was kept of those before them, and which of them are wanted in the end."""

    positions: Tensor  # [tokens] int64
    batch: AttentionBatch
    kv: KVPool
    attention: AttentionBackend
    wanted: Tensor | None  # [n] int64: the tokens that go on behind the last attention; None: all
    sums: Tensor | None  # [tokens] float32, filled behind the last attention: finite where the token's K and V are
    ranks: Collective | None  # that have the other heads
    tokens: TokenAdapters | None  # whose adapters the linears look at; None: there are none
    states: States | None = None  # None: no layer has any
    inputs: Tensor | None = (
        None  # [tokens, layers, width]: each layer's part of a second embedding; None: there is none
    )

    def slots(self, tokens: int) -> Tensor:
        """Where each token's K and V went, of the tokens that still go on: [tokens] int64; padding: inside page 0."""
        slots = self.batch.slots
        return slots if self.wanted is None or len(slots) == tokens else slots.index_select(0, self.wanted)

    def pieces(self, tokens: int) -> Sequence[slice]:
        """In which pieces so many tokens are computed until they meet in attention."""
        return [slice(0, tokens)] if self.ranks is None else self.ranks.pieces(tokens)

    def narrow(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the last attention nobody looks at tokens that are not wanted: they go no further.

        attended [tokens, width] and x [tokens, hidden] -> the same for the wanted ones.
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
    """A part of a decoder, with its residual inside."""

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden], which may be used up -> [tokens, hidden], behind the last attention of wanted tokens."""
        ...

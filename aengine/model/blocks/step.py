"""The arguments of a step that the blocks of a decoder read."""

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
from aengine.kernels.lora.base import TokenAdapters
from aengine.kernels.recurrent.state import StateBatch
from aengine.model.rope import rotate_by_axes


@dataclass(slots=True)
class States:
    """The states of recurrent layers, and the slots of the step's sequences."""

    pool: StatePool
    batch: StateBatch


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The embeddings of images among the tokens of a step."""

    at: Tensor  # [n] int64: the tokens of the step that have one
    tokens: Tensor  # [n, hidden]: take the place of embeddings from the table
    deep: tuple[Tensor, ...] = ()  # [n, hidden] each: added after the first layers, one for each layer


class TokenTables:
    """Rotary tables with a row for each token of a step, for tokens with several positions."""

    def __init__(self, positions: Tensor, axes: Tensor) -> None:
        """positions: [axes, tokens] int64. axes: as in `rotate_by_axes`."""
        self._positions = positions
        self._axes = axes
        self._made: list[tuple[Tensor, Tensor]] = []  # tables of all positions, and those of the tokens

    def of(self, table: Tensor) -> Tensor:
        """Return the table whose row i is for token i. Layers share it."""
        for known, made in self._made:
            if known is table:
                return made
        made = rotate_by_axes(table, self._positions, self._axes)
        self._made.append((table, made))
        return made


@dataclass(slots=True)
class Step:
    """The tokens of a step, the caches that they read, and the tokens whose hidden states are wanted."""

    positions: Tensor  # [tokens] int64, rows of `table`
    batch: AttentionBatch
    kv: KVPool
    wanted: Tensor | None  # [n] int64: the tokens that are computed after the last attention. None: all.
    sums: Tensor | None  # [tokens] float32, filled after the last attention; finite if K and V are finite
    ranks: Collective | None  # the model's ranks. None: there is one rank.
    tokens: TokenAdapters | None  # None: the model has no memory for adapters.
    states: States | None = None  # None: no layer is recurrent
    inputs: Tensor | None = None  # [tokens, layers, width]: a second embedding, if the model has one
    by_token: TokenTables | None = None  # None: tokens have one position each

    def table(self, table: Tensor) -> Tensor:
        """Return the rotary table whose rows `positions` names. table: of all positions."""
        return table if self.by_token is None else self.by_token.of(table)

    def slots(self, tokens: int) -> Tensor:
        """Return the KV slots of the tokens that are still computed, [tokens] int64. Padding has slots in page 0."""
        slots = self.batch.slots
        return slots if self.wanted is None or len(slots) == tokens else slots.index_select(0, self.wanted)

    def pieces(self, tokens: int) -> Sequence[slice]:
        """Return the slices of the tokens that ranks compute one after the other. One rank has one slice."""
        return [slice(0, tokens)] if self.ranks is None else self.ranks.pieces(tokens)

    def narrow(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return `attended` and `x` for the wanted tokens only. Called after the last attention.

        attended: [tokens, width]. x: [tokens, hidden].
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

        The last block that attends returns only the wanted tokens.
        """
        ...

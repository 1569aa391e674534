"""The interface of draft heads.

A head reads pairs: the target's hidden states at position p, and the id of the token at position p + 1. It keeps keys
and values of each pair at position p, in layers that follow the target's layers in the same KV pool. So pages, the
prefix cache, forks and preemption treat them like the target's own.

A step runs the head once over all of its tokens. For each sequence this gives the first draft, after the last token
that the target kept. Each further draft runs the head over one token of each sequence, on the states that the run
before returned. A wrong draft costs time, but it never changes what the model writes.

`DFlashHead` is of another kind: it drafts all tokens in one run. It needs no id of the next token: it keeps keys and
values of the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVLayer, KVPool


@dataclass(frozen=True, slots=True)
class Taps:
    """The hidden states of the target that a head reads.

    layers: indices of layers, ascending. The residual stream before each of them is taken; an index equal to the number
    of layers means the stream after the last layer, before the final norm. The states of all layers are concatenated.
    Empty: the output of the final norm.
    """

    layers: tuple[int, ...] = ()
    tokens_only: bool = False  # whether no states are read, only the step's tokens


@dataclass(frozen=True, slots=True)
class TapStates:
    """Memory for the hidden states of `Taps` that name layers. `Decoder.forward` fills it."""

    layers: tuple[int, ...]  # of `Taps`
    states: Tensor  # [tokens, layers * hidden]: the states of all layers, side by side


@dataclass(slots=True)
class Drafted:
    """The output of one run of a head."""

    hidden: Tensor  # [n, width], the input of `DraftHead.logits`
    states: Tensor  # [n, width], the states of the next run


class DraftHead(Protocol):
    """A draft head whose weights are loaded. It only enqueues work, so that a CUDA graph can capture it."""

    name: str  # "mtp" or "eagle3", for statistics
    taps: Taps
    kv_layers: tuple[KVLayer, ...]  # what it keeps of each token; their indices in the pool follow the target's layers

    def forward(
        self,
        next_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: KVPool,
        wanted: Tensor | None = None,
        recycled: bool = False,
    ) -> Drafted:
        """Run the head and write its keys and values at `batch.slots`.

        Args:
            next_ids: [tokens] int64, the id of the token that follows each token.
            states: [tokens, width]: the taps of the target, or with `recycled` the states of the run before, which may
                be overwritten.
            positions: [tokens] int64, the positions of the states, as `Decoder.forward` takes them.
            batch: The sequences, as the target reads them.
            wanted: [n] int64, the tokens after which a token is drafted. None: all, in order.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the head's vocabulary, [n, tokens of the head], for `Drafted.hidden`."""
        ...

    @property
    def token_ids(self) -> Tensor | None:
        """The target's id of each token of the head's vocabulary, int64. None: the vocabularies are equal."""
        ...

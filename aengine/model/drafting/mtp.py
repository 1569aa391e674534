"""MTP heads: one more decoder layer, stored with the model, that reads an embedding and a hidden state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVLayer, KVPool
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.layers import LayerBuilder
from aengine.model.blocks.step import Step
from aengine.model.drafting.base import Drafted, Taps
from aengine.model.families.mtp import MTPSpec
from aengine.model.parameters import Embed, Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec.layer import NormSpec


class MTPHead:
    """A `DraftHead` that is a layer of the target's kind. It uses the target's embedding and output matrix."""

    name = "mtp"
    taps = Taps()

    def __init__(
        self,
        build: BuildContext,
        spec: MTPSpec,
        embed: Embed,
        logits: Callable[[Tensor], Tensor],
        first_kv_layer: int,
    ) -> None:
        """Build the layer without its weights, which are in the groups of `build.make`.

        Args:
            build: The target's, except that its parameters have no adapters.
            embed: Returns the target's embeddings of tokens, before a factor. No family with MTP layers has one.
            logits: Returns the target's logits [n, vocab] for hidden states [n, hidden].
            first_kv_layer: The number of layers that the target has in the KV pool.
        """
        make = build.make
        self.kv_layers: tuple[KVLayer, ...] = (spec.attention.kv_layer(make.shard.count),)
        self._embed = embed
        self._logits = logits
        self._zeroes_first = spec.zeroes_first
        self._recycles_normed = spec.recycles_normed
        self._ranks = make.ranks
        # Parameters are made in the order of computation, as `Parameters.norm` demands.
        self._join = _Join(make, spec, build.hidden)
        self._blocks = LayerBuilder(build, (spec.layer,), (spec.name,), first_kv_layer).build(0)
        self._norm = _norm(make, spec.final_norm, build.hidden)

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
        """See `DraftHead.forward`. `recycled` changes nothing: the target's states and the head's are of one kind."""
        step = Step(positions, batch, kv, wanted, None, self._ranks, None)
        if self._ranks is not None:
            self._ranks.begin_step(rehearsal=False, halves=False)
        x = self._join(self._embed(next_ids), states, positions == 0 if self._zeroes_first else None)
        for block in self._blocks:
            if len(x):  # 0 if no token is wanted
                x = block(x, step)
        normed = self._norm(x)
        return Drafted(normed, normed if self._recycles_normed else x)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.logits`. All ranks return all logits."""
        return self._logits(hidden)

    @property
    def token_ids(self) -> Tensor | None:
        return None


class _Join:
    """Norms an embedding and a state, and makes the input of the layer from both."""

    def __init__(self, make: Parameters, spec: MTPSpec, hidden: int) -> None:
        self._embedding_norm = _norm(make, spec.embedding_norm, hidden)
        self._state_norm = _norm(make, spec.state_norm, hidden)
        inputs = Part(2 * hidden)
        self._linear = make.linear({spec.projection: Part(hidden)}, inputs.width, split="inputs")
        self._columns = slice(*make.shard.range(inputs))
        self._total = make.sum()

    def __call__(self, embedded: Tensor, states: Tensor, first: Tensor | None) -> Tensor:
        """Return the input [tokens, hidden].

        embedded, states: [tokens, hidden]. first: [tokens] bool, the tokens whose embedding is zero. None: none is.
        """
        embedded = self._embedding_norm(embedded)
        if first is not None:  # the norm of zeros is zero
            embedded = embedded.masked_fill_(first.unsqueeze(-1), 0.0)
        joined = torch.cat((embedded, self._state_norm(states)), dim=-1)
        if self._total is None:
            return self._linear.apply(joined)
        return self._total(self._linear.apply(joined[:, self._columns].contiguous()))


def _norm(make: Parameters, spec: NormSpec, hidden: int) -> Callable[[Tensor], Tensor]:
    return make.norm(spec.name, hidden, spec.eps, spec.offset)

"""EAGLE-3 heads: one or several Llama layers that read hidden states of three layers of the target.

P-EAGLE heads are of the same kind. A further run of theirs makes all drafts after the first. It reads a mask for each
of them: the embedding of a token of its own, and trained hidden states instead of the target's.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.cache.kv import KVPool
from aengine.kernels.linear.base import Norm
from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.step import Block, Step
from aengine.model.drafting.base import Drafted, Taps
from aengine.model.drafting.ends import TargetEnds, make_token_ids
from aengine.model.families.heads import Eagle3Spec
from aengine.model.parameters import HEAD, Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import LayerSpec


class Eagle3Head:
    """An EAGLE-3 head. Before it can compute, a loader must fill and close its `groups`."""

    name = "eagle3"

    def __init__(self, build: BuildContext, spec: Eagle3Spec, target: TargetEnds) -> None:
        """Build the layers without their weights.

        Args:
            build: Its `make` has the ranks that the head is spread over, which `spec.spread_over` tells. Its `hidden`
                and `eps` are those of `spec`. Its tables reach as far as the target's.
        """
        make, hidden, eps = build.make, spec.hidden_size, spec.rms_norm_eps
        self.taps = Taps(spec.taps)
        self.kv_layers = tuple(attention.kv_layer(make.shard.count) for attention in spec.attention)
        self._ranks = make.ranks
        self._near_shift = target.near_shift
        # Blocks are made in the order of computation, as `Parameters.norm` demands.
        self._join = _StateJoin(make, spec)
        self.mask_id = spec.mask_id
        if spec.mask_id is not None:
            self._mask = make.tensor("model.mask_hidden", 1, len(spec.taps) * spec.target_hidden_size)
        self._embed = target.embed
        if spec.has_embedding:
            self._embed, _ = make.embedding("model.embed_tokens", spec.target_vocab_size, hidden, None)
        self._blocks: list[Block] = []
        for i, layer in enumerate(spec.layers):
            name = f"model.{f'layers.{i}' if i else spec.first_layer}"
            kv = LayerKV(target.first_kv_layer + i, make.kv_scales(f"{name}.self_attn"))
            last = i == len(spec.layers) - 1
            if not isinstance(layer.attention, AttentionSpec) or not isinstance(layer.ffn, MLPSpec):
                raise TypeError(f"a layer of an EAGLE-3 head has {layer}")
            if i == 0:
                self._first = _FirstAttention(build, name, layer, layer.attention, kv, last, spec)
            else:
                self._blocks.append(Attention(build, name, layer, layer.attention, kv, last))
            self._blocks.append(MLP(build, name, layer, layer.ffn))
        self._norm = make.norm("model.norm", hidden, eps)
        self._recycles_norm = spec.norm_output
        has_head = spec.has_head
        self._logits = make.head(HEAD, spec.draft_vocab_size, hidden).logits if has_head else target.logits()
        self._token_ids = make_token_ids(build, spec) if spec.is_mapped else None
        self.groups = make.groups

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
        """See `DraftHead.forward`. After the last layer's attention, only the wanted tokens are computed."""
        if self._near_shift:  # no layer of a head has longrope
            positions = positions.remainder(self._near_shift)
        step = Step(positions, batch, kv, wanted, None, self._ranks, None)
        if self._ranks is not None:
            self._ranks.begin_step(rehearsal=False, halves=False)
        x = states if recycled else self._join(states)
        x = self._first(self._embed(next_ids), x, step)
        for block in self._blocks:
            if len(x):  # 0 if no token is wanted
                x = block(x, step)
        normed = self._norm(x)
        return Drafted(normed, normed if self._recycles_norm else x)

    def mask_states(self, count: int) -> Tensor:
        """Return the states of masks for a recycled run of a P-EAGLE head, [count, hidden]."""
        return self._join(self._mask).repeat(count, 1)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.logits`. All ranks return all logits."""
        return self._logits(hidden)

    @property
    def token_ids(self) -> Tensor | None:
        return self._token_ids


class _StateJoin:
    """Makes one state of the states that the taps give, with the norms that a head may have before that."""

    def __init__(self, make: Parameters, head: Eagle3Spec) -> None:
        taps, width, eps = len(head.taps), head.target_hidden_size, head.rms_norm_eps
        self._width = width
        self._norms = [make.norm(f"model.fc_norm.{i}", width, eps) for i in range(taps)] if head.fc_norm else []
        self._norm = make.norm("model.input_norm", taps * width, eps) if head.norm_before_fc else None
        self._linear = make.linear({"model.fc": Part(head.hidden_size)}, taps * width)

    def __call__(self, states: Tensor) -> Tensor:
        """[tokens, taps * target's hidden] -> [tokens, hidden]."""
        if self._norms:
            parts = states.split(self._width, dim=-1)
            states = torch.cat([norm(part.contiguous()) for norm, part in zip(self._norms, parts)], dim=-1)
        return self._linear.apply(states, norm=self._norm)


class _FirstAttention:
    """The attention of the first layer. It reads the embedding of a token and the state before it, side by side."""

    def __init__(
        self,
        build: BuildContext,
        name: str,
        layer: LayerSpec,
        spec: AttentionSpec,
        kv: LayerKV,
        last: bool,
        head: Eagle3Spec,
    ) -> None:
        """name: the layer's name in checkpoints. last: whether no later layer attends."""
        make, hidden, eps = build.make, head.hidden_size, head.rms_norm_eps
        self._embedding_norm: Norm = make.norm(f"{name}.input_layernorm", hidden, eps)
        self._state_norm: Norm = make.norm(f"{name}.hidden_norm", hidden, eps)
        self._adds_to_norm = head.norm_before_residual
        unnormed = replace(layer, norms=replace(layer.norms, before_attention=None))
        self._attention = Attention(build, name, unnormed, spec, kv, last, inputs=2 * hidden)

    def __call__(self, embedded: Tensor, x: Tensor, step: Step) -> Tensor:
        """embedded: [tokens, hidden]. x: the states [tokens, hidden], which may be overwritten."""
        normed = self._state_norm(x)
        inputs = torch.cat((self._embedding_norm(embedded), normed), dim=-1)
        return self._attention.attend_and_add(inputs, normed if self._adds_to_norm else x, step)

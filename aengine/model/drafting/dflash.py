"""DFlash heads: a few layers that draft all tokens of a block at once.

The head reads hidden states of several layers of the target. Each of its layers makes keys and values from them, for
every token that the target has computed. A block is the last drawn token, and a mask token for each draft. Its tokens
attend to those keys and values and to each other. The output at a mask token predicts the token at its own position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch, AttentionLayer
from aengine.cache.kv import KVPool
from aengine.kernels.attention.heads import Heads
from aengine.kernels.kv_scales import KVScales
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.drafting.base import Taps
from aengine.model.drafting.ends import TargetEnds, make_token_ids
from aengine.model.families.heads import DFlashSpec
from aengine.model.parameters import HEAD
from aengine.model.ranks.shard import Part
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import LayerSpec


class DFlashHead:
    """A DFlash head. It only enqueues work.

    Before it can compute, a loader must fill and close its `groups`.
    """

    name = "dflash"

    def __init__(self, build: BuildContext, spec: DFlashSpec, target: TargetEnds) -> None:
        """Build the layers without their weights.

        Args:
            build: Its `make` has the ranks that the head is spread over, which `spec.spread_over` tells. Its `hidden`
                and `eps` are those of `spec`. Its tables reach as far as the target's.
        """
        make, hidden, eps = build.make, spec.hidden_size, spec.rms_norm_eps
        self.taps = Taps(spec.taps)
        self.kv_layers = tuple(attention.kv_layer(make.shard.count) for attention in spec.attention)
        self.mask_id = spec.mask_id  # the id that stands for each draft
        self.is_causal = spec.is_causal  # whether a token of a block sees only the block's tokens up to itself
        self._ranks = make.ranks
        self._near_shift = target.near_shift
        # Norms are made in the order of computation, as `Parameters.norm` demands.
        states = len(spec.taps) * spec.target_hidden_size
        self._join = make.linear({"model.fc": Part(hidden)}, states)
        self._state_norm = make.norm("model.hidden_norm", hidden, eps)
        self._embed = target.embed
        if spec.has_embedding:
            self._embed, _ = make.embedding("model.embed_tokens", spec.target_vocab_size, hidden, None)
        self._layers: list[tuple[_BlockAttention, MLP]] = []
        for i, layer in enumerate(spec.layers):
            name = f"model.layers.{i}"
            if not isinstance(layer.attention, AttentionSpec) or not isinstance(layer.ffn, MLPSpec):
                raise TypeError(f"a layer of a DFlash head has {layer}")
            kv = LayerKV(target.first_kv_layer + i, make.kv_scales(f"{name}.self_attn"))
            attention = _BlockAttention(build, name, layer, layer.attention, kv, i == len(spec.layers) - 1)
            self._layers.append((attention, MLP(build, name, layer, layer.ffn)))
        self._norm = make.norm("model.norm", hidden, eps)
        has_head = spec.has_head
        self._logits = make.head(HEAD, spec.draft_vocab_size, hidden).logits if has_head else target.logits()
        self._token_ids = make_token_ids(build, spec) if spec.is_mapped else None
        self.groups = make.groups

    def observe(self, states: Tensor, positions: Tensor, slots: Tensor, kv: KVPool) -> None:
        """Write the keys and values of tokens that the target has computed.

        Args:
            states: [tokens, width], the taps of the target.
            positions: [tokens] int64, as `Decoder.forward` takes them.
            slots: [tokens] int64, where the keys and values are written.
        """
        x, positions = self._state_norm(self._join.apply(states)), self._own_positions(positions)
        for attention, _ in self._layers:
            attention.store(x, positions, slots, kv)

    def draft(self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: KVPool, wanted: Tensor) -> Tensor:
        """Return the input of `logits` for wanted tokens of blocks, [n, width].

        The head writes the blocks' keys and values at `batch.slots`. A later `observe` overwrites them. After the last
        layer's attention, only the wanted tokens are computed.

        Args:
            token_ids: [tokens] int64. Each block is the last drawn token of a sequence and masks.
            positions: [tokens] int64, as `Decoder.forward` takes them.
            batch: Each block is a decode.
            wanted: [n] int64, the tokens at whose positions a token is drafted.
        """
        step = Step(self._own_positions(positions), batch, kv, wanted, None, self._ranks, None)
        if self._ranks is not None:
            self._ranks.begin_step(rehearsal=False, halves=False)
        x = self._embed(token_ids)
        for attention, mlp in self._layers:
            x = mlp(attention(x, step), step)
        return self._norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits over the head's vocabulary, [n, tokens of the head], for the result of `draft`.

        All ranks return all logits.
        """
        return self._logits(hidden)

    @property
    def token_ids(self) -> Tensor | None:
        """See `DraftHead.token_ids`."""
        return self._token_ids

    def _own_positions(self, positions: Tensor) -> Tensor:
        """Return the positions by which the head rotates. No layer of a head has longrope."""
        return positions.remainder(self._near_shift) if self._near_shift else positions


class _BlockAttention:
    """The attention of a layer. Keys and values come from the target's states, and within a block from the residual.

    The projection of queries is separate, because states have no queries.
    """

    def __init__(
        self, build: BuildContext, name: str, layer: LayerSpec, spec: AttentionSpec, layer_kv: LayerKV, last: bool
    ) -> None:
        """name: the layer's name in checkpoints. last: whether no later layer attends."""
        make, prefix, dim = build.make, f"{name}.self_attn", spec.head_dim
        self._kernels = make.kernels
        self._norm = make.layer_norm(name, layer.norms.before_attention, build.hidden)
        queries, keys = Part(spec.heads, dim), Part(spec.kv_heads, dim)
        self._q = make.linear({f"{prefix}.q_proj": queries}, build.hidden, spec.qkv_bias, split="outputs")
        kv = {f"{prefix}.{one}_proj": keys for one in "kv"}
        self._kv = make.linear(kv, build.hidden, spec.qkv_bias, split="outputs")
        self._out = make.linear({f"{prefix}.o_proj": Part(build.hidden)}, spec.queries, spec.out_bias, split="inputs")
        normed = spec.qk_norm == "head"
        q_norm, k_norm = (
            make.norm_weight(f"{prefix}.{one}_norm", Part(1, dim), spec.qk_norm_offset) if normed else None
            for one in "qk"
        )
        self._heads = Heads(make.shard.units(spec.heads), q_norm, k_norm, build.eps)
        self._no_queries = Heads(0, q_norm, k_norm, build.eps)
        self._cos_sin = build.tables.rope(spec.rope, dim)
        self._index = layer_kv.index
        self._last = last
        self._add = Addition.of_block(build, name, layer.norms.after_attention, layer.residual_scale)
        attention = AttentionLayer(dim, dim**-0.5 if spec.scale is None else spec.scale)
        bind = build.attention.bind

        def use_scales(scales: KVScales) -> None:
            self._scales = scales
            self._attend = bind(attention.with_scales(scales))

        layer_kv.scales.add_reader(use_scales)

    def store(self, states: Tensor, positions: Tensor, slots: Tensor, kv: KVPool) -> None:
        """Write the keys and values of the target's states. No norm is applied before the projection."""
        self._rotate_and_store(self._kv.apply(states), self._no_queries, positions, slots, kv)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x [tokens, hidden], which may be overwritten -> [tokens, hidden]; after the last attention, wanted tokens."""
        normed = x if self._norm is None else self._norm(x)
        projected = torch.cat((self._q.apply(normed), self._kv.apply(normed)), dim=-1)
        q = self._rotate_and_store(projected, self._heads, step.positions, step.batch.slots, step.kv)
        attended = self._attend(q, *step.kv.layer(self._index), step.batch).flatten(1)
        return self._add.project_and_add(self._out, attended, x, step if self._last else None)

    def _rotate_and_store(self, qkv: Tensor, heads: Heads, positions: Tensor, slots: Tensor, kv: KVPool) -> Tensor:
        """Return the queries of `qkv`, and write its keys and values into the cache."""
        cache = kv.layer(self._index)
        return self._kernels.qk_norm_rope_store(qkv, heads, self._cos_sin, positions, cache, slots, self._scales)

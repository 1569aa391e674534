"""Causal self-attention over latents (MLA). The cache keeps one vector per token: all heads derive K and V from it."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.attention.base import AttentionLayer
from aengine.kernels.attention.heads import LatentHeads
from aengine.kernels.kv_scales import KVScales
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.attention import LatentSpec
from aengine.model.spec.layer import LayerSpec

_EPS = 1e-6  # of the norms of queries and latents, in all models


class LatentAttention:
    """Norm, projections, attention over latents, the projection back, and the addition to x.

    Keys and values of single heads are never computed. The matrix that would make keys is applied to queries, and the
    matrix that would make values is applied to the result. So all heads attend to the same vectors, like the query
    heads of one KV head.
    """

    def __init__(
        self, build: BuildContext, name: str, layer: LayerSpec, spec: LatentSpec, layer_kv: LayerKV, last: bool
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        layer_kv: The layer's latents.
        last: Whether no later layer attends.
        """
        make, hidden = build.make, build.hidden
        prefix, norms, self._spec = f"{name}.self_attn", layer.norms, spec
        heads, latent = Part(spec.heads, spec.key_dim), Part(1, spec.latent)
        self._norm = make.layer_norm(name, norms.before_attention, hidden)
        down: dict[str, Part | tuple[Part, ...]] = {f"{prefix}.kv_a_proj_with_mqa": latent}
        self._query_norm = None
        if spec.query_rank:
            down = {f"{prefix}.q_a_proj": Part(1, spec.query_rank), **down}
            weight = make.norm_weight(f"{prefix}.q_a_layernorm", Part(1, spec.query_rank))
            self._query_norm = make.kernels.norm(weight, _EPS)
        self._down = make.linear(down, hidden, spec.bias)
        query = "q_b_proj" if spec.query_rank else "q_proj"
        self._queries = make.linear({f"{prefix}.{query}": heads}, spec.query_rank or hidden, split="outputs")
        weight = make.norm_weight(f"{prefix}.kv_a_layernorm", Part(1, spec.rank))
        self._heads = LatentHeads(weight, _EPS, spec.rotated, spec.interleaved)
        self._kernels = make.kernels
        # For each head the rows that make keys, then those that make values.
        up = make.matrix(f"{prefix}.kv_b_proj", Part(spec.heads, spec.unrotated + spec.value_dim), spec.rank)
        self._to_keys, self._to_values = up.view(-1, spec.unrotated + spec.value_dim, spec.rank).split(
            [spec.unrotated, spec.value_dim], dim=1
        )
        self._out = make.linear({f"{prefix}.o_proj": Part(hidden)}, spec.values, spec.bias, split="inputs")
        self._cos_sin = build.tables.rope(spec.rope, spec.rotated)
        self._index = layer_kv.index
        self._last = last
        self._add = Addition.of_block(build, name, norms.after_attention, layer.residual_scale)
        attention = AttentionLayer(spec.latent, spec.scale, latent_rank=spec.rank)
        bind = build.attention.bind

        def use_scales(scales: KVScales) -> None:
            # A latent is key and value at once, so it has one scale.
            self._scale = scales.key
            self._attend = bind(attention.with_scales(KVScales(scales.key, scales.key)))

        layer_kv.scales.add_reader(use_scales)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        q = self._project(x, step)
        read = self._attend(q, *step.kv.layer(self._index), step.batch)
        attended = x.new_empty(len(q), q.shape[1], self._spec.value_dim)
        # [heads, tokens, rank] times [heads, rank, value_dim]
        torch.bmm(read.transpose(0, 1), self._to_values.transpose(1, 2), out=attended.transpose(0, 1))
        return self._add.project_and_add(self._out, attended.flatten(1), x, step if self._last else None)

    def _project(self, x: Tensor, step: Step) -> Tensor:
        """Return queries [tokens, heads, latent], and store each token's latent in the cache."""
        spec, h = self._spec, x if self._norm is None else self._norm(x)
        down = self._down.apply(h)
        if self._query_norm is not None:
            h = self._query_norm(down[:, : spec.query_rank].contiguous())
        q: Tensor = self._queries.apply(h).unflatten(1, (-1, spec.key_dim))
        read: Tensor = q.new_empty(*q.shape[:2], spec.latent)
        torch.bmm(q[..., : spec.unrotated].transpose(0, 1), self._to_keys, out=read[..., : spec.rank].transpose(0, 1))
        cache, _ = step.kv.layer(self._index)
        self._kernels.latent_inputs(
            down[:, -spec.latent :], q, self._heads, self._cos_sin, step.positions, cache, step.batch.slots, read,
            self._scale,
        )  # fmt: skip
        return read

"""Causal self-attention over latents: of a token one vector is kept, out of which heads make keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.attention.heads import LatentHeads
from aengine.model.blocks.ends import Addition
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.rope import PositionTables
from aengine.model.spec import LatentSpec, LayerSpec

_EPS = 1e-6  # of the norms in between, whatever the model's is


class LatentAttention:
    """Norm, projections, attention over latents, and the projection back onto x.

    Keys are never made: what would make them of latents is multiplied with queries, and what would make values, with
    what is attended to. So all heads attend to the same vectors, as the query heads of one KV head.
    """

    def __init__(
        self,
        make: Parameters,
        layer: str,
        hidden: int,
        layer_spec: LayerSpec,
        spec: LatentSpec,
        eps: float,
        index: int,
        last: bool,
        tables: PositionTables,
    ) -> None:
        """layer: its name in checkpoints; index: its place in the KV pool; last: no block behind it attends."""
        name, norms, self._spec = f"{layer}.self_attn", layer_spec.norms, spec
        heads, latent = Part(spec.heads, spec.key_dim), Part(1, spec.latent)
        self._norm = make.optional_norm(layer, norms.before_attention, hidden, eps)
        down: dict[str, Part | tuple[Part, ...]] = {f"{name}.kv_a_proj_with_mqa": latent}
        self._query_norm = None
        if spec.query_rank:
            down = {f"{name}.q_a_proj": Part(1, spec.query_rank), **down}
            weight = make.norm_weight(f"{name}.q_a_layernorm", Part(1, spec.query_rank))
            self._query_norm = make.kernels.norm(weight, _EPS)
        self._down = make.linear(down, hidden, spec.bias)
        query = "q_b_proj" if spec.query_rank else "q_proj"
        self._queries = make.linear({f"{name}.{query}": heads}, spec.query_rank or hidden, split="outputs")
        weight = make.norm_weight(f"{name}.kv_a_layernorm", Part(1, spec.rank))
        self._heads = LatentHeads(weight, _EPS, spec.rotated, spec.interleaved)
        self._kernels = make.kernels
        # Of each head what makes its keys, and below that what makes its values.
        up = make.matrix(f"{name}.kv_b_proj", Part(spec.heads, spec.plain + spec.value_dim), spec.rank)
        self._to_keys, self._to_values = up.view(-1, spec.plain + spec.value_dim, spec.rank).split(
            [spec.plain, spec.value_dim], dim=1
        )
        self._out = make.linear({f"{name}.o_proj": Part(hidden)}, spec.values, spec.bias, split="inputs")
        self._kv_scales = make.kv_scales(name)
        self._cos_sin = tables.rope(spec.rope, spec.rotated)
        self._index = index
        self._last = last
        self._add = Addition.after(make, layer, norms.after_attention, hidden, eps, layer_spec.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        q, spec, key_scale = self._project(x, step), self._spec, self._kv_scales.loaded.key
        cache, _ = step.kv.layer(self._index)
        read = step.attention.over_latents(q, cache, spec.rank, step.batch, spec.scale * key_scale, key_scale)
        attended = x.new_empty(len(q), q.shape[1], spec.value_dim)
        # [heads, tokens, rank] times [heads, rank, value_dim]
        torch.bmm(read.transpose(0, 1), self._to_values.transpose(1, 2), out=attended.transpose(0, 1))
        return self._add.behind(self._out, attended.flatten(1), x, step if self._last else None)

    def _project(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, heads, latent]; each token's own latent goes where the step says."""
        spec, h = self._spec, x if self._norm is None else self._norm(x)
        down = self._down.apply(h)
        if self._query_norm is not None:
            h = self._query_norm(down[:, : spec.query_rank].contiguous())
        q: Tensor = self._queries.apply(h).unflatten(1, (-1, spec.key_dim))
        read: Tensor = q.new_empty(*q.shape[:2], spec.latent)
        torch.bmm(q[..., : spec.plain].transpose(0, 1), self._to_keys, out=read[..., : spec.rank].transpose(0, 1))
        cache, _ = step.kv.layer(self._index)
        self._kernels.latent_inputs(
            down[:, -spec.latent :], q, self._heads, self._cos_sin, step.positions, cache, step.batch.slots, read,
            self._kv_scales.loaded.key,
        )  # fmt: skip
        return read

"""Causal self-attention over latents: of a token one vector is kept, out of which heads make keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.kv_scales import FP8, as_bytes, encode
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
        self._latent_norm = make.kernels.norm(make.norm_weight(f"{name}.kv_a_layernorm", Part(1, spec.rank)), _EPS)
        # Of each head what makes its keys, and below that what makes its values.
        up = make.rows(make.floats(f"{name}.kv_b_proj"), Part(spec.heads, spec.plain + spec.value_dim), spec.rank)
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
        q, scales = self._project(x, step), self._kv_scales.loaded
        cache, _ = step.kv.layer(self._index)
        scale = self._spec.scale * scales.key
        read = step.attention.over_latents(q, cache, self._spec.rank, step.batch, scale, scales.key)
        # [heads, tokens, rank] times [heads, rank, value_dim]
        attended = torch.bmm(read.transpose(0, 1), self._to_values.transpose(1, 2)).transpose(0, 1).flatten(1)
        return self._add.behind(self._out, attended, x, step if self._last else None)

    def _project(self, x: Tensor, step: Step) -> Tensor:
        """[tokens, heads, latent]; each token's own latent goes where the step says."""
        spec, h = self._spec, x if self._norm is None else self._norm(x)
        down = self._down(h)
        if self._query_norm is not None:
            h = self._query_norm(down[:, : spec.query_rank].contiguous())
        q = self._queries(h).unflatten(1, (-1, spec.key_dim))
        cos_sin = self._cos_sin.index_select(0, step.positions).unsqueeze(1)
        latent = down[:, -spec.latent :]
        kept = torch.cat(
            (
                self._latent_norm(latent[:, : spec.rank].contiguous()),
                _turned(latent[:, None, spec.rank :], cos_sin, spec.interleaved).squeeze(1),
            ),
            dim=1,
        )
        self._store(kept, step)
        read = torch.bmm(q[..., : spec.plain].transpose(0, 1), self._to_keys).transpose(0, 1)
        return torch.cat((read, _turned(q[..., spec.plain :], cos_sin, spec.interleaved)), dim=-1)

    def _store(self, latents: Tensor, step: Step) -> None:
        """latents [tokens, latent]."""
        cache, _ = step.kv.layer(self._index)
        codes = encode(latents, self._kv_scales.loaded.key) if cache.dtype == FP8 else latents.to(cache.dtype)
        as_bytes(cache).view(-1, latents.shape[1]).index_copy_(0, step.batch.slots, as_bytes(codes))


def _turned(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, rotated], cos_sin [tokens, 1, rotated]: pairs are neighbours, or half of a head apart."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    wide = x.float()
    first, second = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

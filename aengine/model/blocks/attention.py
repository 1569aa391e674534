"""Causal self-attention with grouped queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from aengine.kernels.attention.heads import Heads, Scores
from aengine.kernels.linear.base import Norm
from aengine.model.blocks.ends import Addition
from aengine.model.blocks.step import Step
from aengine.model.kv_scales import LoadedKVScales
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.rope import PositionTables
from aengine.model.spec import AttentionSpec, LayerSpec


class Attention:
    """Projection, attention over what the layer keeps in the KV pool, and the projection back onto x, between norms."""

    def __init__(
        self,
        make: Parameters,
        layer: str,
        hidden: int,
        layer_spec: LayerSpec,
        spec: AttentionSpec,
        eps: float,
        index: int,
        last: bool,
        tables: PositionTables,
        keeper: Attention | None = None,
    ) -> None:
        """layer: its name in checkpoints; index: its place in the KV pool; last: no block behind it attends; keeper:
        the block whose keys and values this one reads; None: it keeps its own.
        """
        norms = layer_spec.norms
        self._kernels = make.kernels
        self._norm = make.optional_norm(layer, norms.before_attention, hidden, eps)
        name = f"{layer}.self_attn"
        queries, keys = Part(spec.heads, (1 + spec.gate) * spec.head_dim), Part(spec.kv_heads, spec.head_dim)
        parts: dict[str, Part | tuple[Part, ...]] = (
            {f"{name}.qkv_proj": (queries, keys, keys)}
            if spec.fused
            else {f"{name}.q_proj": queries, **{f"{name}.{kept}_proj": keys for kept in "kv"[: spec.projected]}}
        )
        self._qkv = make.linear(parts, hidden, spec.qkv_bias, split="outputs")
        self._out = make.linear({f"{name}.o_proj": Part(hidden)}, spec.queries, spec.out_bias, split="inputs")
        heads = make.shard.units(spec.heads)
        behind: Literal["both", "keys", "nothing"] = ("nothing", "keys", "both")[spec.projected]
        self._heads = Heads(heads, None, None, eps, spec.gate, spec.v_norm, behind)
        self._dim = spec.head_dim
        self._wide_norms: list[tuple[slice, Norm]] = []  # of columns of the projection
        if spec.qk_norm == "head":
            q_norm = make.norm_weight(f"{name}.q_norm", Part(1, spec.head_dim))
            k_norm = make.norm_weight(f"{name}.k_norm", Part(1, spec.head_dim)) if keeper is None else None
            self._heads = replace(self._heads, q_norm=q_norm, k_norm=k_norm)
        elif spec.qk_norm == "all":
            first, second = heads * spec.head_dim, make.shard.units(spec.kv_heads) * spec.head_dim
            self._wide_norms = [
                (slice(first), make.wide_norm(f"{name}.q_norm", queries, eps)),
                (slice(first, first + second), make.wide_norm(f"{name}.k_norm", keys, eps)),
            ]
        self._kv_scales: LoadedKVScales = make.kv_scales(name) if keeper is None else keeper._kv_scales
        self._cos_sin = tables.rope(spec.rope, spec.head_dim)
        self._growth = None if spec.growth is None else tables.growth(spec.growth)
        self._scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._window = spec.window
        self._scores = Scores(spec.softcap, make.sinks(name, Part(spec.heads)) if spec.sinks else None)
        self._index: int = index if keeper is None else keeper._index
        self._last = last
        self._add = Addition.after(make, layer, norms.after_attention, hidden, eps, layer_spec.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        (q, gates), cache, scales = self._queries(x, step), step.kv.layer(self._index), self._kv_scales.loaded
        scale = self._scale * scales.key  # of keys, whatever they are kept as
        attended = step.attention.forward(
            q, *cache, step.batch.of(self._window), scale, self._window, scales.value, self._scores
        ).flatten(1)
        if gates is not None:
            attended = self._kernels.gate_output(attended, gates)
        return self._add.behind(self._out, attended, x, step if self._last else None)

    def _queries(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor | None]:
        """[tokens, heads, dim], and as many gates of what each attends to, where there are any; keys and values go
        where the step says.
        """
        pieces, slots = step.pieces(len(x)), step.batch.of(self._window).slots
        if len(pieces) == 1:
            return self._project(x, step, step.positions, slots)
        q = x.new_empty(len(x), self._heads.count, self._dim)
        gates = torch.empty_like(q) if self._heads.gated else None
        for rows in pieces:
            _, some = self._project(x[rows], step, step.positions[rows], slots[rows], q[rows])
            if gates is not None and some is not None:
                gates[rows] = some
        return q, gates

    def _project(
        self, x: Tensor, step: Step, positions: Tensor, slots: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self._qkv.apply(x, norm=self._norm)
        for columns, norm in self._wide_norms:
            qkv[:, columns] = norm(qkv[:, columns])
        cache, scales = step.kv.layer(self._index), self._kv_scales.loaded
        q = self._kernels.qk_norm_rope_store(qkv, self._heads, self._cos_sin, positions, cache, slots, scales, out)
        if self._growth is not None:
            q.mul_(self._growth[positions].to(q.dtype)[:, None, None])
        if not self._heads.gated:
            return q, None
        return q, qkv.unflatten(1, (-1, self._dim))[:, 1 : 2 * self._heads.count : 2]  # each behind its head

"""Causal self-attention with grouped queries."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from aengine.attention.base import AttentionLayer
from aengine.attention.local_chunks import cut_into_chunks
from aengine.kernels.attention.heads import Heads, Scores
from aengine.kernels.kv_scales import KVScales
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.layer_norm import HeadLayerNorms
from aengine.model.blocks.build import BuildContext, LayerKV, projected_parts
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.layer import LayerSpec


class Attention:
    """Norm, projection to queries, keys and values, attention, projection back, and the addition to x."""

    def __init__(
        self,
        build: BuildContext,
        name: str,
        layer: LayerSpec,
        spec: AttentionSpec,
        layer_kv: LayerKV,
        last: bool,
        inputs: int | None = None,
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        layer_kv: The keys and values that the layer reads, which may be another layer's.
        last: Whether no later layer attends.
        inputs: The width of what is projected to queries, keys and values. None: the hidden size.
        """
        make, prefix = build.make, f"{name}.{spec.block}"
        self._kernels = make.kernels
        self._norm = make.layer_norm(name, layer.norms.before_attention, build.hidden)
        parts = projected_parts(prefix, spec)
        self._qkv = make.linear(parts, inputs or build.hidden, spec.qkv_bias, split="outputs")
        self._out = make.linear(
            {f"{prefix}.{spec.out}": Part(build.hidden)}, spec.attended, spec.out_bias, split="inputs"
        )
        self._heads = _make_heads(build, prefix, spec)
        self._gates = _find_gates(build, spec) if spec.gate else None
        # The columns of the projection before the gates, if these have a projection of their own.
        self._before_gates = self._gates.start * spec.head_dim if self._gates and spec.gate_proj else None
        self._head_dim = spec.head_dim
        self._wide_norms = _make_wide_norms(build, prefix, spec) if spec.qk_norm in ("all", "centred") else []
        self._cos_sin = build.tables.rope(spec.rope, spec.head_dim)
        self._growth = None if spec.growth is None else build.tables.growth(spec.growth)
        self._window = spec.window
        self._chunk = spec.chunk_within(build.tables.max_positions)
        self._index = layer_kv.index
        self._last = last
        self._add = Addition.of_block(build, name, layer.norms.after_attention, layer.residual_scale)
        sinks = make.sinks(prefix, Part(spec.heads)) if spec.sinks else None
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        attention = AttentionLayer(spec.head_dim, scale, spec.masked_window, Scores(spec.softcap, sinks))
        bind = build.attention.bind

        def use_scales(scales: KVScales) -> None:
            self._scales = scales
            self._attend = bind(attention.with_scales(scales))

        layer_kv.scales.add_reader(use_scales)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.attend_and_add(x, x, step)

    def attend_and_add(self, inputs: Tensor, x: Tensor, step: Step) -> Tensor:
        """Attend with the projections of `inputs` [tokens, width], and add the result to x, which may be overwritten.

        The norm before attention, if there is one, is applied to `inputs`.
        """
        batch = cut_into_chunks(step.batch.for_window(self._window), self._chunk, step.kv.page_size)
        q, gates = self._project(inputs, step, batch.slots)
        attended = self._attend(q, *step.kv.layer(self._index), batch).flatten(1)
        if gates is not None:
            attended = self._kernels.gate_output(attended, gates)
        return self._add.project_and_add(self._out, attended, x, step if self._last else None)

    def _project(self, x: Tensor, step: Step, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries [tokens, heads, head_dim], and the gates of the output, or None if the layer has no gates.

        Keys and values are written into the cache at `slots`.
        """
        pieces = step.pieces(len(x))
        if len(pieces) == 1:
            return self._project_piece(x, step, step.positions, slots)
        q = x.new_empty(len(x), self._heads.count, self._head_dim)
        gates = None if self._gates is None else torch.empty_like(q)
        for rows in pieces:
            _, some = self._project_piece(x[rows], step, step.positions[rows], slots[rows], q[rows])
            if gates is not None and some is not None:
                gates[rows] = some
        return q, gates

    def _project_piece(
        self, x: Tensor, step: Step, positions: Tensor, slots: Tensor, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        qkv = self._qkv.apply(x, norm=self._norm)
        for columns, norm in self._wide_norms:
            qkv[:, columns] = norm(qkv[:, columns])
        cache = step.kv.layer(self._index)
        table = step.table(self._cos_sin)
        q = self._kernels.qk_norm_rope_store(
            qkv[:, : self._before_gates], self._heads, table, positions, cache, slots, self._scales, out
        )
        if self._growth is not None:
            q.mul_(self._growth[positions].to(q.dtype)[:, None, None])
        return q, None if self._gates is None else qkv.unflatten(1, (-1, self._head_dim))[:, self._gates]


def _make_heads(build: BuildContext, prefix: str, spec: AttentionSpec) -> Heads:
    """Return the layout of the projection's columns, with the norms of single heads."""
    q_norm = k_norm = None
    if spec.qk_norm == "head":
        q_norm = _make_head_norm(build, f"{prefix}.{spec.norms[0]}", spec)
        if spec.projected:
            k_norm = _make_head_norm(build, f"{prefix}.{spec.norms[1]}", spec)
    kv: Literal["both", "keys", "nothing"] = ("nothing", "keys", "both")[spec.projected]
    heads = build.make.shard.units(spec.heads)
    gated = spec.gates_follow_heads
    return Heads(heads, q_norm, k_norm, build.eps, gated, spec.v_norm, spec.interleaved, kv)


def _make_head_norm(build: BuildContext, name: str, spec: AttentionSpec) -> Tensor:
    """Return the weight of a norm of single heads. name: in the checkpoint, if that has a weight."""
    if spec.qk_norm_weight:
        return build.make.norm_weight(name, Part(1, spec.head_dim), spec.qk_norm_offset)
    return torch.ones(spec.head_dim, device=build.tables.device)


def _find_gates(build: BuildContext, spec: AttentionSpec) -> slice:
    """Return the places of the gates among the heads of the projection: after each query head, or after all others."""
    units = build.make.shard.units
    heads = units(spec.heads)
    if spec.gates_follow_heads:
        return slice(1, 2 * heads, 2)
    first = heads + spec.projected * units(spec.kv_heads)
    return slice(first, first + heads)


def _make_wide_norms(build: BuildContext, prefix: str, spec: AttentionSpec) -> list[tuple[slice, Norm]]:
    """Make the norms over all query heads and over all key heads, each with its columns of the projection.

    They are one norm each, or a LayerNorm of each head.
    """
    make, norms, start = build.make, [], 0
    for name, heads in zip(spec.norms, (spec.heads, spec.kv_heads)):
        end = start + make.shard.units(heads) * spec.head_dim
        part = Part(heads, spec.head_dim)
        norm: Norm = (
            HeadLayerNorms(make.rows(f"{prefix}.{name}.weight", Part(heads), spec.head_dim), build.eps)
            if spec.qk_norm == "centred"
            else make.wide_norm(f"{prefix}.{name}", part, build.eps, spec.qk_norm_offset)
        )
        norms.append((slice(start, end), norm))
        start = end
    return norms

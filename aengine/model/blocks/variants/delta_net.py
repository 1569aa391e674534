"""Linear attention by a gated delta net."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from aengine.kernels.delta.base import DeltaWeights
from aengine.kernels.recurrent.state import RecurrentHeads
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part, Range
from aengine.model.spec.layer import LayerSpec
from aengine.model.spec.recurrent import DeltaSpec

Parts = dict[str, Part | tuple[Part, ...]]


class GatedDeltaNet:
    """Norm, projections, an update and a read of each row's state, the projection back, and the addition to x."""

    def __init__(
        self, build: BuildContext, name: str, layer: LayerSpec, spec: DeltaSpec, index: int, last: bool
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        index: The number of the layer among recurrent layers.
        last: Whether no later layer attends.
        """
        make, hidden, eps = build.make, build.hidden, build.eps
        prefix, norms, units = f"{name}.linear_attn", layer.norms, make.shard.units
        keys, values = Part(spec.key_heads, spec.key_dim), Part(spec.value_heads, spec.value_dim)
        each = Part(spec.value_heads)
        # This rank's.
        heads = RecurrentHeads(units(spec.key_heads), units(spec.value_heads), spec.key_dim, spec.value_dim)
        self._norm = make.layer_norm(name, norms.before_attention, hidden)
        self._widths = [heads.channels, heads.values, heads.value_heads, heads.value_heads]
        rows: dict[str, tuple[Range, ...]] = {}
        if spec.interleaved:
            qkvz, ba = interleaved_rows(spec, make.shard.range(Part(spec.key_heads)))
            large: Parts = {f"{prefix}.in_proj_qkvz": Part(spec.heads.channels + spec.heads.values)}
            small: Parts = {f"{prefix}.in_proj_ba": Part(2 * spec.value_heads)}
            rows = {f"{prefix}.in_proj_qkvz": qkvz, f"{prefix}.in_proj_ba": ba}
        else:
            large = {f"{prefix}.in_proj_qkv": (keys, keys, values), f"{prefix}.in_proj_z": values}
            small = {f"{prefix}.in_proj_b": each, f"{prefix}.in_proj_a": each}
        # Quantised checkpoints usually leave b and a as floats.
        split = [large, small] if make.quantizes else [{**large, **small}]
        self._projections = [make.linear(parts, hidden, split="outputs", rows=rows) for parts in split]
        conv = make.rows(f"{prefix}.conv1d.weight", (keys, keys, values), 1, spec.conv).squeeze(1)
        a_log, dt_bias = (make.rows(f"{prefix}.{part}", each, dtype=torch.float32) for part in ("A_log", "dt_bias"))
        norm = make.tensor(f"{prefix}.norm.weight", heads.value_dim)
        self._delta = make.kernels.delta_net(DeltaWeights(heads, conv, a_log, dt_bias, norm, eps))
        self._out = make.linear({f"{prefix}.out_proj": Part(hidden)}, values.width, split="inputs")
        self._add = Addition.of_block(build, name, norms.after_attention, layer.residual_scale)
        self._index = index
        self._last = last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if step.states is None:
            raise ValueError("the step has no states for a recurrent layer")
        if len(self._projections) == 1:
            qkv, z, b, a = self._projections[0].apply(x, norm=self._norm).split(self._widths, dim=1)
        else:
            h = x if self._norm is None else self._norm(x)
            large, small = (projection.apply(h) for projection in self._projections)
            qkv, z = large.split(self._widths[:2], dim=1)
            b, a = small.split(self._widths[2:], dim=1)
        read = self._delta(qkv, z, b, a, step.states.pool.layer(self._index), step.states.batch)
        return self._add.project_and_add(self._out, read, x, step if self._last else None)


def interleaved_rows(spec: DeltaSpec, heads: Range) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
    """Return the rows of q, k, v and z of these key heads, and those of b and a.

    The checkpoint has one matrix for q, k, v and z and another for b and a, both ordered by key head.
    """
    each = spec.value_heads // spec.key_heads
    values = each * spec.value_dim
    return _by_head((spec.key_dim, spec.key_dim, values, values), heads), _by_head((each, each), heads)


def _by_head(widths: tuple[int, ...], heads: Range) -> tuple[Range, ...]:
    """Return row ranges sorted by part: the first part of each head, then the second part of each head, and so on."""
    starts, size = [0, *accumulate(widths)], sum(widths)
    first = [(head * size + start, width) for start, width in zip(starts, widths) for head in range(*heads)]
    return tuple((at, at + width) for at, width in first)

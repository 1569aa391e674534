"""Linear attention by a gated delta net."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.delta.base import DeltaHeads, DeltaWeights
from aengine.model.blocks.ends import Addition, taken
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import DeltaSpec, LayerSpec

Parts = dict[str, Part | tuple[Part, ...]]


class GatedDeltaNet:
    """Norm, projections, the update and the reading of each row's state, and the projection back onto x."""

    def __init__(
        self,
        make: Parameters,
        layer: str,
        hidden: int,
        layer_spec: LayerSpec,
        spec: DeltaSpec,
        eps: float,
        index: int,
        last: bool,
    ) -> None:
        """layer: its name in checkpoints; index: its place among the states; last: no block behind it attends."""
        name, norms, units = f"{layer}.linear_attn", layer_spec.norms, make.shard.units
        keys, values = Part(spec.key_heads, spec.key_dim), Part(spec.value_heads, spec.value_dim)
        each = Part(spec.value_heads)
        # Of this rank.
        heads = DeltaHeads(units(spec.key_heads), units(spec.value_heads), spec.key_dim, spec.value_dim)
        self._norm = make.optional_norm(layer, norms.before_attention, hidden, eps)
        self._widths = [heads.channels, heads.values, heads.value_heads, heads.value_heads]
        order = None
        if spec.interleaved:
            order = interleaved_rows(spec)
            large: Parts = {f"{name}.in_proj_qkvz": Part(sum(self._widths[:2]))}
            small: Parts = {f"{name}.in_proj_ba": Part(sum(self._widths[2:]))}
        else:
            large = {f"{name}.in_proj_qkv": (keys, keys, values), f"{name}.in_proj_z": values}
            small = {f"{name}.in_proj_b": each, f"{name}.in_proj_a": each}
        # What is quantised leaves b and a out, as a rule.
        split = [large, small] if make.quantizes and order is None else [{**large, **small}]
        self._projections = [make.linear(parts, hidden, split="outputs", order=order) for parts in split]
        conv = make.rows(f"{name}.conv1d.weight", (keys, keys, values), 1, spec.conv).squeeze(1)
        a_log, dt_bias = (make.rows(f"{name}.{part}", each, dtype=torch.float32) for part in ("A_log", "dt_bias"))
        norm = make.tensor(f"{name}.norm.weight", heads.value_dim)
        self._delta = make.kernels.delta_net(DeltaWeights(heads, conv, a_log, dt_bias, norm, eps))
        self._out = make.linear({f"{name}.out_proj": Part(hidden)}, values.width, split="inputs")
        self._add = Addition.after(make, layer, norms.after_attention, hidden, eps, layer_spec.residual_scale)
        self._index = index
        self._last = last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if step.states is None:
            raise ValueError("a model with states needs a pool of them")
        if len(self._projections) == 1:
            qkv, z, b, a = taken(self._projections[0], self._norm, x).split(self._widths, dim=1)
        else:
            h = x if self._norm is None else self._norm(x)
            large, small = (projection(h) for projection in self._projections)
            qkv, z = large.split(self._widths[:2], dim=1)
            b, a = small.split(self._widths[2:], dim=1)
        read = self._delta(qkv, z, b, a, step.states.pool.layer(self._index), step.states.batch)
        if self._last:
            read, x = step.narrow(read, x)
            if not len(x):
                return x
        if self._add.fused:
            return self._out.add_to(read, x)
        return self._add.of(lambda rows: self._out(read[rows]), x)


def interleaved_rows(spec: DeltaSpec) -> Tensor:
    """Where the rows of q, k, v, z, b and a are in matrices that hold them by key head: qkvz, then ba; int64."""
    heads, each = spec.heads, spec.value_heads // spec.key_heads
    values = each * spec.value_dim
    qkvz = torch.arange(heads.channels + heads.values).view(spec.key_heads, -1)
    ba = torch.arange(2 * spec.value_heads).view(spec.key_heads, -1) + qkvz.numel()
    parts = (*qkvz.split([spec.key_dim, spec.key_dim, values, values], dim=1), *ba.split(each, dim=1))
    return torch.cat([part.flatten() for part in parts])

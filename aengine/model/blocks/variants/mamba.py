"""Mamba2."""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.kernels.linear.base import Norm
from aengine.kernels.mamba.base import MambaWeights
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.layer import LayerSpec
from aengine.model.spec.recurrent import MambaSpec


class Mamba2:
    """Norm, a projection, an update and a read of each row's state, a norm, the projection back, the addition to x."""

    def __init__(
        self,
        build: BuildContext,
        name: str,
        layer: LayerSpec,
        spec: MambaSpec,
        index: int,
        last: bool,
        add: Addition | None = None,
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        index: The number of the layer among recurrent layers.
        last: Whether no later layer attends.
        add: How the result is added. None: as the layer says.
        """
        make, hidden, prefix = build.make, build.hidden, f"{name}.{spec.block}"
        keys, values, each = Part(spec.groups, spec.state_dim), Part(spec.heads, spec.head_dim), Part(spec.heads)
        heads = spec.rank_heads(make.shard.count)
        self._norm = make.layer_norm(name, layer.norms.before_attention, hidden)
        self._widths = [heads.values, heads.channels, heads.value_heads]
        parts = {f"{prefix}.in_proj": (values, values, keys, keys, each)}
        self._in = make.linear(parts, hidden, spec.in_bias, split="outputs")
        channels = (values, keys, keys)
        conv = make.rows(f"{prefix}.conv1d.weight", channels, 1, spec.conv).squeeze(1)
        conv_bias = make.rows(f"{prefix}.conv1d.bias", channels) if spec.conv_bias else None
        a_log, dt_bias, skip = (
            make.rows(f"{prefix}.{part}", each, dtype=torch.float32) for part in ("A_log", "dt_bias", "D")
        )
        self._mamba = make.kernels.mamba(MambaWeights(heads, conv, conv_bias, a_log, dt_bias, skip))
        self._group_norm = _make_group_norm(build, f"{prefix}.norm", spec) if spec.norm else None
        out = {f"{prefix}.out_proj": Part(hidden)}
        self._out = make.linear(out, values.width, spec.out_bias, split="inputs")
        widths = spec.projected(make.shard.count)
        factors = [torch.full((width,), factor) for width, factor in zip(widths, spec.factors)]
        self._factors = torch.cat(factors).to(conv.dtype).to(build.tables.device) if factors else None
        self._add = add or Addition.of_block(build, name, layer.norms.after_attention, layer.residual_scale)
        self._index = index
        self._last = last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.compute_and_add(x, x, step)

    def compute_and_add(self, inputs: Tensor, x: Tensor, step: Step) -> Tensor:
        """Add the result for `inputs` to x, both [tokens, hidden]. x may be overwritten.

        The norm before the projection, if there is one, is applied to `inputs`.
        """
        if step.states is None:
            raise ValueError("the step has no states for a recurrent layer")
        projected = self._in.apply(inputs, norm=self._norm)
        if self._factors is not None:
            projected.mul_(self._factors)
        z, xbc, dt = projected.split(self._widths, dim=1)
        read = self._mamba(xbc, z, dt, step.states.pool.layer(self._index), step.states.batch)
        if self._group_norm is not None:
            read = self._group_norm(read)
        return self._add.project_and_add(self._out, read, x, step if self._last else None)


class _GroupNorm:
    """An RMS norm of each group of columns, with a weight for each column."""

    def __init__(self, norm: Norm, weight: Tensor, width: int) -> None:
        """norm: of `width` columns, with ones as its weight. weight: [groups * width], filled before a call."""
        self._norm = norm
        self._weight = weight
        self._width = width

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, groups * width] -> the same shape."""
        return self._norm(x.view(-1, self._width)).view(x.shape).mul_(self._weight)


def _make_group_norm(build: BuildContext, name: str, spec: MambaSpec) -> Norm | _GroupNorm:
    """Make the norm of a layer's results. name: in the checkpoint."""
    make, part = build.make, Part(spec.heads, spec.head_dim)
    if spec.groups == 1:  # over the heads of all ranks
        return make.wide_norm(name, part, build.eps)
    width = part.width // spec.groups
    weight = make.norm_weight(name, part)
    ones = torch.ones(width, dtype=weight.dtype, device=build.tables.device)
    return _GroupNorm(make.kernels.norm(ones, build.eps), weight, width)

"""A gated convolution over the last few tokens (LFM2)."""

from __future__ import annotations

from torch import Tensor

from aengine.kernels.recurrent.short_conv import ShortConv
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.layer import LayerSpec
from aengine.model.spec.recurrent import ConvSpec


class GatedShortConv:
    """Norm, three projections b, c and x, the convolution of b * x times c, the projection back, the addition to x."""

    def __init__(
        self, build: BuildContext, name: str, layer: LayerSpec, spec: ConvSpec, index: int, last: bool
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        index: The number of the layer among recurrent layers.
        last: Whether no later layer attends.
        """
        make, prefix, channels = build.make, f"{name}.conv", Part(spec.channels)
        self._norm = make.layer_norm(name, layer.norms.before_attention, build.hidden)
        parts = {f"{prefix}.in_proj": (channels, channels, channels)}
        self._in = make.linear(parts, build.hidden, spec.bias, split="outputs")
        weight = make.rows(f"{prefix}.conv.weight", channels, 1, spec.conv).squeeze(1)
        bias = make.rows(f"{prefix}.conv.bias", channels) if spec.bias else None
        self._conv = ShortConv(weight, bias)
        out = {f"{prefix}.out_proj": Part(build.hidden)}
        self._out = make.linear(out, spec.channels, spec.bias, split="inputs")
        self._add = Addition.of_block(build, name, layer.norms.after_attention, layer.residual_scale)
        self._index = index
        self._last = last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if step.states is None:
            raise ValueError("the step has no states for a recurrent layer")
        b, c, inputs = self._in.apply(x, norm=self._norm).chunk(3, dim=1)
        states = step.states
        read = self._conv(b * inputs, states.pool.layer(self._index), states.batch).mul_(c)
        return self._add.project_and_add(self._out, read, x, step if self._last else None)

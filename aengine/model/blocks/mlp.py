"""The feed-forward part of a dense layer."""

from __future__ import annotations

from torch import Tensor

from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec import LayerSpec, MLPSpec, NormSpec


class MLP:
    """Norm, gated MLP, and the addition to x."""

    def __init__(self, build: BuildContext, name: str, layer: LayerSpec, spec: MLPSpec) -> None:
        """name: the layer's name in checkpoints."""
        self._gated = GatedMLP(build, name, layer.norms.before_ffn, spec)
        self._add = Addition.of_block(build, name, layer.norms.after_ffn, layer.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if not self._add.is_fused:
            return self._add.add_result(lambda rows: self._gated(x[rows]), x)
        return self._gated.add_to(x)


class GatedMLP:
    """A norm, then down(activation(gate) * up). Gate and up are one product."""

    def __init__(self, build: BuildContext, name: str, norm: NormSpec | None, spec: MLPSpec) -> None:
        """name: the layer's name in checkpoints."""
        make = build.make
        self._kernels = make.kernels
        self._activation = spec.activation
        inner = Part(spec.inner)
        self._norm = make.layer_norm(name, norm, build.hidden)
        parts: dict[str, Part | tuple[Part, ...]] = (
            {f"{name}.mlp.gate_up_proj": (inner, inner)}
            if spec.fused
            else {f"{name}.mlp.gate_proj": inner, f"{name}.mlp.up_proj": inner}
        )
        self._gate_up = make.linear(parts, build.hidden, spec.bias, split="outputs")
        down = {f"{name}.mlp.down_proj": Part(build.hidden)}
        self._down = make.linear(down, spec.inner, spec.bias, split="inputs")

    def add_to(self, x: Tensor) -> Tensor:
        """Return x [tokens, hidden] plus the result. x may be overwritten."""
        if (inner := self._inner(x)) is not None:
            return self._down.apply(inner, residual=x)
        return self._down.apply(self._gate_up.apply(x, norm=self._norm), gated=True, residual=x)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the result for x [tokens, hidden]. With several ranks, each rank returns a partial sum."""
        if (inner := self._inner(x)) is not None:
            return self._down.apply(inner)
        return self._down.apply(self._gate_up.apply(x, norm=self._norm), gated=True)

    def _inner(self, x: Tensor) -> Tensor | None:
        """Return activation(gate) * up [tokens, inner], or None if the down product computes SiLU itself."""
        if self._activation == "silu":
            return self._gate_up.apply_activated(x, self._norm)
        return self._kernels.gelu_mul(self._gate_up.apply(x, norm=self._norm))

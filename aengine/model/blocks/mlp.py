"""The feed-forward part of a dense layer."""

from __future__ import annotations

from torch import Tensor

from aengine.model.blocks.ends import Addition
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import LayerSpec, MLPSpec


class MLP:
    """Gate and up as one product, SiLU(gate) * up, and the projection back onto x, between norms."""

    def __init__(
        self, make: Parameters, layer: str, hidden: int, layer_spec: LayerSpec, spec: MLPSpec, eps: float
    ) -> None:
        """layer: its name in checkpoints."""
        norms = layer_spec.norms
        self._part = GatedProducts(make, layer, hidden, norms.before_ffn, spec, eps)
        self._add = Addition.after(make, layer, norms.after_ffn, hidden, eps, layer_spec.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if not self._add.fused:
            return self._add.of(lambda rows: self._part(x[rows]), x)
        return self._part.add_to(x)


class GatedProducts:
    """A norm, gate and up as one product, their activation, and the product behind it."""

    def __init__(self, make: Parameters, layer: str, hidden: int, norm: str | None, spec: MLPSpec, eps: float) -> None:
        """layer: its name in checkpoints; norm: its name there."""
        self._kernels = make.kernels
        self._activation = spec.activation
        inner = Part(spec.inner)
        self._norm = make.optional_norm(layer, norm, hidden, eps)
        parts: dict[str, Part | tuple[Part, ...]] = (
            {f"{layer}.mlp.gate_up_proj": (inner, inner)}
            if spec.fused
            else {f"{layer}.mlp.gate_proj": inner, f"{layer}.mlp.up_proj": inner}
        )
        self._gate_up = make.linear(parts, hidden, spec.bias, split="outputs")
        self._down = make.linear({f"{layer}.mlp.down_proj": Part(hidden)}, spec.inner, spec.bias, split="inputs")

    def add_to(self, x: Tensor) -> Tensor:
        """x [tokens, hidden], which may be used up, and on top of it what comes of it."""
        if (inner := self._inner(x)) is not None:
            return self._down.apply(inner, residual=x)
        return self._down.apply(self._gate_up.apply(x, norm=self._norm), gated=True, residual=x)

    def __call__(self, x: Tensor) -> Tensor:
        """What comes of x [tokens, hidden]; of ranks, each gives its part of the sum."""
        if (inner := self._inner(x)) is not None:
            return self._down.apply(inner)
        return self._down.apply(self._gate_up.apply(x, norm=self._norm), gated=True)

    def _inner(self, x: Tensor) -> Tensor | None:
        """The activated gate * up [tokens, inner]; None: SiLU is left to the product behind."""
        if self._activation == "silu":
            return self._gate_up.apply_activated(x, self._norm)
        return self._kernels.gelu_mul(self._gate_up.apply(x, norm=self._norm))

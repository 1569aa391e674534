"""The feed-forward part of a dense layer."""

from __future__ import annotations

from torch import Tensor

from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import MLPSpec


class MLP:
    """Norm, gate and up as one product, SiLU(gate) * up, and the projection back onto x."""

    def __init__(self, make: Parameters, layer: str, hidden: int, spec: MLPSpec, eps: float) -> None:
        """layer: its name in checkpoints."""
        self._norm = make.norm(f"{layer}.post_attention_layernorm", hidden, eps)
        inner = Part(spec.inner)
        parts = {f"{layer}.mlp.gate_proj": inner, f"{layer}.mlp.up_proj": inner}
        self._gate_up = make.linear(parts, hidden, spec.bias, split="outputs")
        self._down = make.linear({f"{layer}.mlp.down_proj": Part(hidden)}, spec.inner, spec.bias, split="inputs")
        self._sum = make.sum()

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if self._sum is None:
            return self._down.add_gated_to(self._gate_up.after(self._norm, x), x)
        return self._sum.of(lambda rows: self._down.gated(self._gate_up.after(self._norm, x[rows])), x)

"""The feed-forward part of a dense layer."""

from __future__ import annotations

from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.kernels.collective.base import Collective
from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.feed_forward import Activation, MLPSpec
from aengine.model.spec.layer import LayerSpec, NormSpec


class MLP:
    """Norm, MLP, and the addition to x."""

    def __init__(self, build: BuildContext, name: str, layer: LayerSpec, spec: MLPSpec) -> None:
        """name: the layer's name in checkpoints."""
        self._inside = GatedMLP(build, name, layer.norms.before_ffn, spec)
        self._add = Addition.of_block(build, name, layer.norms.after_ffn, layer.residual_scale)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self.compute_and_add(x, x)

    def compute_and_add(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Add the result for `inputs` to x, both [tokens, hidden]. x may be overwritten.

        The norm before the MLP, if there is one, is applied to `inputs`.
        """
        if not self._add.is_fused:
            return self._add.add_result(lambda rows: self._inside(inputs[rows]), x)
        return self._inside.add_to(inputs, x)


def gate_up_parts(block: str, spec: MLPSpec) -> dict[str, Part | tuple[Part, ...]]:
    """Return the matrices of gate and up by their names in checkpoints. block: the MLP's name."""
    inner = Part(spec.inner)
    if spec.gated and spec.fused:
        return {f"{block}.{spec.fused_name}": (inner, inner)}
    return {f"{block}.{one}": inner for one in ((spec.gate, spec.up) if spec.gated else (spec.up,))}


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Return GELU of x, or the square of ReLU. For MLPs without a gate."""
    return F.relu(x).square_() if activation == "relu2" else F.gelu(x, approximate="tanh")


class SparseGates:
    """Replaces gates by their excess over a threshold, or by 0 if they are below it.

    The threshold is the quantile of a normal distribution with the mean and the deviation of the token's gates.
    """

    def __init__(self, sparsity: float, dtype: torch.dtype, ranks: Collective | None) -> None:
        """dtype: of the gates. ranks: among which the columns are divided."""
        # Rounded like the gates.
        self._factor = torch.tensor(NormalDist().inv_cdf(sparsity), dtype=dtype).item()
        self._ranks = ranks

    def __call__(self, gates: Tensor) -> None:
        """Change the gates [tokens, columns] in place."""
        deviation, mean = torch.std_mean(gates, dim=1, correction=0, keepdim=True)
        if self._ranks is not None:
            own = torch.cat((mean, deviation), dim=1).float()
            of_all = self._ranks.gather(own, 2 * self._ranks.count).unflatten(1, (-1, 2))  # [tokens, ranks, 2]
            means, deviations = of_all.unbind(2)
            mean = means.mean(1, keepdim=True)
            deviation = (deviations.square() + (means - mean).square()).mean(1, keepdim=True).sqrt()
        gates.sub_(mean.float() + self._factor * deviation.float()).relu_()


class GatedMLP:
    """A norm, then down(activation(gate) * up), where gate and up are one product. Some MLPs have no gate."""

    def __init__(self, build: BuildContext, name: str, norm: NormSpec | None, spec: MLPSpec) -> None:
        """name: the layer's name in checkpoints."""
        make = build.make
        self._kernels = make.kernels
        self._spec = spec
        block = f"{name}.{spec.block}"
        self._norm = make.layer_norm(name, norm, build.hidden)
        self._gate_up = make.linear(gate_up_parts(block, spec), build.hidden, spec.bias, split="outputs")
        self._sparse = SparseGates(spec.sparsity, make.dtype, make.ranks) if spec.sparsity else None
        self._xielu = make.xielu(f"{block}.act_fn") if spec.activation == "xielu" else None
        down = {f"{block}.{spec.down}": Part(build.hidden)}
        self._down = make.linear(down, spec.inner, spec.bias, split="inputs")

    def add_to(self, inputs: Tensor, x: Tensor) -> Tensor:
        """Return x plus the result for `inputs`, both [tokens, hidden]. x may be overwritten."""
        if (inner := self._inner(inputs)) is not None:
            return self._down.apply(inner, residual=x)
        return self._down.apply(self._gate_up.apply(inputs, norm=self._norm), gated=True, residual=x)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the result for x [tokens, hidden]. With several ranks, each rank returns a partial sum."""
        if (inner := self._inner(x)) is not None:
            return self._down.apply(inner)
        return self._down.apply(self._gate_up.apply(x, norm=self._norm), gated=True)

    def _inner(self, x: Tensor) -> Tensor | None:
        """Return the activated columns [tokens, inner], or None if the down product computes SiLU(gate) * up itself."""
        if self._xielu is not None:
            return self._kernels.xielu(self._gate_up.apply(x, norm=self._norm), self._xielu)
        if not self._spec.gated:
            return activate(self._spec.activation, self._gate_up.apply(x, norm=self._norm))
        if self._spec.gate_scale != 1.0:
            gate_up = self._gate_up.apply(x, norm=self._norm)
            gate_up.chunk(2, dim=1)[0].mul_(self._spec.gate_scale)
            return self._kernels.silu_mul(gate_up)
        if self._spec.activation == "silu":
            return self._gate_up.apply_activated(x, self._norm)
        gate_up = self._gate_up.apply(x, norm=self._norm)
        if self._sparse is not None:
            self._sparse(gate_up.chunk(2, dim=1)[0])
        return self._kernels.gelu_mul(gate_up)

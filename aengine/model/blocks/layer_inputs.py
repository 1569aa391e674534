"""A second embedding of each token, of which every layer gets a part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.blocks.ends import Addition
from aengine.model.blocks.step import Step
from aengine.model.parameters import Parameters
from aengine.model.ranks.shard import Part
from aengine.model.spec import LayerInputsSpec, LayerSpec


class LayerInputs:
    """A token's row of a table of its own, and a projection of its embedding, mixed. Every rank has all of it."""

    def __init__(
        self, make: Parameters, layers: int, hidden: int, spec: LayerInputsSpec, eps: float, dtype: torch.dtype
    ):
        self._shape = layers, spec.width
        self._table = make.tensor("model.embed_tokens_per_layer.weight", spec.vocab, layers * spec.width)
        # Rounded as the rows are that it scales.
        self._scale = torch.tensor(spec.width**0.5, dtype=dtype).item()
        self._projection = make.linear({"model.per_layer_model_projection": Part(layers * spec.width)}, hidden)
        self._projection_scale = hidden**-0.5
        weight = make.norm_weight("model.per_layer_projection_norm", Part(1, spec.width))
        self._norm = make.kernels.norm(weight, eps)

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids [tokens], their embedding x [tokens, hidden] -> [tokens, layers, width]."""
        own = (F.embedding(ids, self._table) * self._scale).unflatten(1, self._shape)
        projected = self._norm((self._projection.apply(x) * self._projection_scale).unflatten(1, self._shape))
        return projected.add_(own).mul_(2.0**-0.5)


class LayerInput:
    """A gate of x times the layer's part, projected back onto x, a norm behind it."""

    def __init__(self, make: Parameters, layer: str, hidden: int, spec: LayerSpec, eps: float, index: int) -> None:
        """layer: its name in checkpoints; index: which part is its own."""
        self._index = index
        self._gate = make.linear({f"{layer}.per_layer_input_gate": Part(spec.input_width)}, hidden)
        self._projection = make.linear({f"{layer}.per_layer_projection": Part(hidden)}, spec.input_width)
        self._add = Addition(None, make.optional_norm(layer, "post_per_layer_input_norm", hidden, eps), scale=1.0)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        if step.inputs is None:
            raise ValueError("a layer with a part of a second embedding needs one")
        gate = F.gelu(self._gate.apply(x), approximate="tanh")
        return self._add.of(self._projection.apply(gate.mul_(step.inputs[:, self._index])).__getitem__, x)


class Scalar:
    """x times a number of the checkpoint."""

    def __init__(self, make: Parameters, layer: str) -> None:
        self._scalar = make.tensor(f"{layer}.layer_scalar", 1)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return x.mul_(self._scalar)

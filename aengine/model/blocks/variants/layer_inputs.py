"""A second embedding of each token (Gemma 3n and 4). Every layer reads its own part of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.model.blocks.build import BuildContext
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.ranks.shard import Part
from aengine.model.spec.ends import LayerInputsSpec
from aengine.model.spec.layer import LayerSpec


class LayerInputs:
    """Computes the second embedding: a row of a second table plus a projection of the first embedding, times 2 ** -0.5.

    Every rank has the whole table.
    """

    def __init__(self, build: BuildContext, layers: int, spec: LayerInputsSpec, dtype: torch.dtype) -> None:
        make, hidden = build.make, build.hidden
        self._shape = layers, spec.width
        self._known = spec.vocab if spec.partial else None
        self._table = make.tensor("model.embed_tokens_per_layer.weight", spec.vocab, layers * spec.width)
        # Rounded like the rows that it scales.
        self._scale = torch.tensor(spec.width**0.5, dtype=dtype).item()
        self._projection = make.linear({"model.per_layer_model_projection": Part(layers * spec.width)}, hidden)
        self._projection_scale = hidden**-0.5
        weight = make.norm_weight("model.per_layer_projection_norm", Part(1, spec.width))
        self._norm = make.kernels.norm(weight, build.eps)

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids [tokens], their embedding x [tokens, hidden] -> [tokens, layers, width]."""
        if self._known is not None:
            ids = ids.masked_fill(ids >= self._known, 0)
        own = (F.embedding(ids, self._table) * self._scale).unflatten(1, self._shape)
        projected = self._norm((self._projection.apply(x) * self._projection_scale).unflatten(1, self._shape))
        return projected.add_(own).mul_(2.0**-0.5)


class LayerInput:
    """Adds norm(projection(gate(x) * the layer's part)) to x."""

    def __init__(self, build: BuildContext, name: str, spec: LayerSpec, index: int) -> None:
        """name: the layer's name in checkpoints; index: which part it reads."""
        make, hidden = build.make, build.hidden
        self._index = index
        self._gate = make.linear({f"{name}.per_layer_input_gate": Part(spec.input_width)}, hidden)
        self._projection = make.linear({f"{name}.per_layer_projection": Part(hidden)}, spec.input_width)
        self._norm = make.norm(f"{name}.post_per_layer_input_norm", hidden, build.eps)
        self._add = Addition(None, self._norm, scale=1.0)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return self._add.add_result(self._project(x, step).__getitem__, x)

    def result(self, x: Tensor, step: Step) -> Tensor:
        """Return norm(projection(gate(x) * the layer's part)), [tokens, hidden]."""
        return self._norm(self._project(x, step))

    def _project(self, x: Tensor, step: Step) -> Tensor:
        if step.inputs is None:
            raise ValueError("the layer reads a second embedding, which the step does not have")
        gate = F.gelu(self._gate.apply(x), approximate="tanh")
        return self._projection.apply(gate.mul_(step.inputs[:, self._index]))


class Scalar:
    """Multiplies x with a number of the checkpoint."""

    def __init__(self, build: BuildContext, name: str) -> None:
        self._scalar = build.make.tensor(f"{name}.layer_scalar", 1)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return x.mul_(self._scalar)

"""Attention and an MLP that both read the same norm of x (Cohere)."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.step import Step
from aengine.model.spec import AttentionSpec, LayerSpec, MLPSpec


class AttentionBesideMLP:
    """A norm, then attention and an MLP. Both results are added to x."""

    def __init__(self, build: BuildContext, name: str, layer: LayerSpec, layer_kv: LayerKV, last: bool) -> None:
        """Args:
        name: The layer's name in checkpoints.
        layer_kv: The keys and values of the layer.
        last: Whether no later layer attends.
        """
        if not isinstance(layer.attention, AttentionSpec) or not isinstance(layer.ffn, MLPSpec):
            raise ValueError("only attention over keys and values can be parallel to an MLP")
        self._norm = build.make.layer_norm(name, layer.norms.before_attention, build.hidden)
        without = replace(layer, norms=replace(layer.norms, before_attention=None))
        self._attention = Attention(build, name, without, layer.attention, layer_kv, last)
        self._mlp = MLP(build, name, without, layer.ffn)
        self._last = last

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        h = x if self._norm is None else self._norm(x)
        x = self._attention.attend_and_add(h, x, step)
        if self._last and step.wanted is not None:  # attention has returned only these tokens
            h = h.index_select(0, step.wanted)
        return self._mlp.compute_and_add(h, x) if len(x) else x

"""Attention and an MLP (Cohere), or attention and Mamba2 (Falcon-H1), that both read the same norm of x."""

from __future__ import annotations

from msgspec.structs import replace
from torch import Tensor

from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.residual import Addition
from aengine.model.blocks.step import Step
from aengine.model.blocks.variants.mamba import Mamba2
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import AttentionBesideMambaSpec, LayerSpec


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


class AttentionBesideMamba:
    """A norm, then Mamba2 and attention. Both results are multiplied by factors and added to x."""

    def __init__(
        self,
        build: BuildContext,
        name: str,
        layer: LayerSpec,
        spec: AttentionBesideMambaSpec,
        layer_kv: LayerKV,
        index: int,
        last: bool,
    ) -> None:
        """Args:
        name: The layer's name in checkpoints.
        layer_kv: The keys and values of the layer.
        index: The number of the layer among recurrent layers.
        last: Whether no later layer attends.
        """
        self._norm = build.make.layer_norm(name, layer.norms.before_attention, build.hidden)
        without = replace(layer, norms=replace(layer.norms, before_attention=None))
        # Its sum over ranks does not compute the next norm, because attention is added before.
        add = Addition(build.make.sum(prepares=False), None, spec.mamba_scale)
        self._mamba = Mamba2(build, name, without, spec.mamba, index, False, add)
        without = replace(without, residual_scale=spec.attention_scale)
        self._attention = Attention(build, name, without, spec.attention, layer_kv, last)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        h = x if self._norm is None else self._norm(x)
        return self._attention.attend_and_add(h, self._mamba.compute_and_add(h, x, step), step)

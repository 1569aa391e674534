"""Builds the blocks of a layer from its specification."""

from __future__ import annotations

from collections.abc import Sequence

from aengine.model.blocks.attention import Attention
from aengine.model.blocks.build import BuildContext, LayerKV
from aengine.model.blocks.experts import MixtureOfExperts
from aengine.model.blocks.mlp import MLP
from aengine.model.blocks.step import Block
from aengine.model.blocks.variants.altup import AltUpLayer
from aengine.model.blocks.variants.delta_net import GatedDeltaNet
from aengine.model.blocks.variants.latent_attention import LatentAttention
from aengine.model.blocks.variants.layer_inputs import LayerInput, Scalar
from aengine.model.blocks.variants.mamba import Mamba2
from aengine.model.blocks.variants.mlp_and_experts import MLPAndExperts
from aengine.model.blocks.variants.narrow_values import NarrowValuesAttention
from aengine.model.blocks.variants.parallel import AttentionBesideMamba, AttentionBesideMLP
from aengine.model.blocks.variants.short_conv import GatedShortConv
from aengine.model.spec.attention import AttentionSpec, LatentSpec
from aengine.model.spec.feed_forward import FFN, MLPAndExpertsSpec, MLPSpec
from aengine.model.spec.layer import AttentionBesideMambaSpec, LayerSpec, Mixer
from aengine.model.spec.recurrent import ConvSpec, DeltaSpec, MambaSpec


class LayerBuilder:
    """Builds the layers of a decoder, or of a draft head, in order."""

    def __init__(
        self,
        build: BuildContext,
        layers: Sequence[LayerSpec],
        names: Sequence[str] | None = None,
        first_kv_layer: int = 0,
    ) -> None:
        """Args:
        names: The names of the layers in checkpoints. None: those of a decoder's layers.
        first_kv_layer: The index in the KV pool of the first layer that has keys and values.
        """
        self._build = build
        self._layers = layers
        self._names = names or [f"model.layers.{i}" for i in range(len(layers))]
        self._first_kv_layer = first_kv_layer
        self._kept: dict[int, LayerKV] = {}  # by layer, if it stores its own keys and values
        self._recurrent = 0  # the number of recurrent layers built so far

    def build(self, i: int) -> list[Block]:
        """Build the blocks of layer i."""
        build, layer, name = self._build, self._layers[i], self._names[i]
        blocks = []
        if layer.attention is not None:
            blocks.append(self._attention(i, name, layer, layer.attention))
        if layer.altup is not None:  # its block has all parts
            return blocks
        if layer.ffn is not None and not layer.parallel:
            blocks.append(self._ffn(name, layer, layer.ffn))
        if layer.input_width:
            blocks.append(LayerInput(build, name, layer, i))
        if layer.scalar:
            blocks.append(Scalar(build, name))
        return blocks

    @property
    def last_with_attention(self) -> int:
        """The index of the last layer that attends or is recurrent. Later layers get only the step's wanted tokens."""
        return max(i for i, layer in enumerate(self._layers) if layer.attention is not None)

    def _attention(self, i: int, name: str, layer: LayerSpec, spec: Mixer) -> Block:
        build, last = self._build, i == self.last_with_attention
        if isinstance(spec, DeltaSpec):
            self._recurrent += 1
            return GatedDeltaNet(build, name, layer, spec, self._recurrent - 1, last)
        if isinstance(spec, ConvSpec):
            self._recurrent += 1
            return GatedShortConv(build, name, layer, spec, self._recurrent - 1, last)
        if isinstance(spec, MambaSpec):
            self._recurrent += 1
            return Mamba2(build, name, layer, spec, self._recurrent - 1, last)
        if isinstance(spec, AttentionBesideMambaSpec):
            self._recurrent += 1
            kept = self._keep(i, f"{name}.{spec.attention.block}")
            return AttentionBesideMamba(build, name, layer, spec, kept, self._recurrent - 1, last)
        if spec.shares_kv_of is None:
            self._keep(i, f"{name}.{spec.block if isinstance(spec, AttentionSpec) else 'self_attn'}")
        kept = self._kept[i if spec.shares_kv_of is None else spec.shares_kv_of]
        if layer.altup is not None:
            return AltUpLayer(build, name, layer, layer.altup, kept, i, last)
        if layer.parallel:
            return AttentionBesideMLP(build, name, layer, kept, last)
        if isinstance(spec, LatentSpec):
            return LatentAttention(build, name, layer, spec, kept, last)
        kind = Attention if spec.value_dim is None else NarrowValuesAttention
        return kind(build, name, layer, spec, kept, last)

    def _keep(self, i: int, name: str) -> LayerKV:
        """Make the entry in the KV pool of layer i. name: of its attention in checkpoints."""
        self._kept[i] = kept = LayerKV(self._first_kv_layer + len(self._kept), self._build.make.kv_scales(name))
        return kept

    def _ffn(self, name: str, layer: LayerSpec, spec: FFN) -> Block:
        build = self._build
        if isinstance(spec, MLPSpec):
            return MLP(build, name, layer, spec)
        if isinstance(spec, MLPAndExpertsSpec):
            return MLPAndExperts(build, name, layer, spec)
        return MixtureOfExperts(build, name, layer, spec)

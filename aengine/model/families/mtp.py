"""Layers that draft tokens (multi-token prediction, MTP), as families store them next to the decoder's layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from aengine.model.families.parts import MAX_WIDTH, norm_eps
from aengine.model.fields import Fields
from aengine.model.spec.attention import AttentionSpec, LatentSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import LayerSpec, NormSpec

_MAX_LAYERS = 64
_QWEN = "mtp."


class MTPSpec(msgspec.Struct, frozen=True, kw_only=True, tag="mtp"):
    """An MTP layer: a decoder layer, and what turns an embedding and a hidden state into its input.

    All names are those in checkpoints.
    """

    name: str  # of the decoder layer
    layer: LayerSpec
    embedding_norm: NormSpec
    state_norm: NormSpec
    projection: str  # of the normed embedding and the normed state, side by side
    final_norm: NormSpec
    zeroes_first: bool = False  # whether the embedding is zero at position 0
    recycles_normed: bool = True  # whether the state of the next draft is taken after the final norm
    prefix: str  # of the names of all tensors
    unread: tuple[str, ...] = ()  # prefixes of tensors that are not read: copies of the target's, and further layers

    @property
    def attention(self) -> AttentionSpec | LatentSpec:
        """The attention of the layer. It always has its own keys and values."""
        if not isinstance(self.layer.attention, AttentionSpec | LatentSpec):
            raise TypeError(f"{self.name}: an MTP layer cannot be recurrent")
        return self.layer.attention

    def parameters(self, hidden: int) -> int:
        """Return the number of weights, without those that are the target's."""
        return self.layer.parameters(hidden) + 2 * hidden * hidden + 3 * hidden

    def linears(self, hidden: int, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Return outputs and inputs of each product that all tokens pass, on each rank."""
        return (hidden, 2 * hidden // ranks), *self.layer.linears(hidden, ranks)


@dataclass(frozen=True, slots=True)
class MTPReader:
    """How a family stores MTP layers. Only the first one is used, for all drafts."""

    read: Callable[[Fields, Sequence[LayerSpec], int], MTPSpec]  # from config.json, the layers, and the number of these
    keys: tuple[str, ...]  # keys of config.json that may hold their number
    default: int = 0  # their number if config.json has none of the keys
    prefixes: tuple[str, ...] = ()  # of tensors that files may have whatever config.json says

    def is_named(self, fields: Fields) -> bool:
        """Return whether config.json tells the number."""
        return any(fields.present(key) for key in self.keys)

    def spec(self, fields: Fields, layers: Sequence[LayerSpec]) -> MTPSpec | None:
        """Return the layer that config.json promises, or None if it promises none."""
        key = next((key for key in self.keys if fields.present(key)), self.keys[0])
        count = fields.integer(key, 0, _MAX_LAYERS, self.default)
        return self.read(fields, layers, count) if count else None


def _qwen(fields: Fields, layers: Sequence[LayerSpec], count: int) -> MTPSpec:
    """Qwen: tensors named mtp.*, and a layer of full attention."""
    layer, attention = next(
        (layer, layer.attention) for layer in reversed(layers) if isinstance(layer.attention, AttentionSpec)
    )
    if isinstance(layer.ffn, MLPSpec) and fields.present("mtp_intermediate_size"):
        inner = fields.integer("mtp_intermediate_size", 1, MAX_WIDTH)
        layer = replace(layer, ffn=replace(layer.ffn, inner=inner))
    # Files may have copies of the target's tables. An embedding of the head's own is not supported: it is not ignored.
    own = fields.flag("mtp_use_dedicated_embeddings", default=False)
    copies = () if own else ("mtp.embed_tokens.", "mtp.lm_head.")
    before = layer.norms.before_attention
    eps, offset = norm_eps(fields), 0.0 if before is None else before.offset
    return MTPSpec(
        name="mtp.layers.0",
        layer=replace(layer, attention=replace(attention, window=None)),
        embedding_norm=NormSpec("mtp.pre_fc_norm_embedding", eps, offset),
        state_norm=NormSpec("mtp.pre_fc_norm_hidden", eps, offset),
        projection="mtp.fc",
        final_norm=NormSpec("mtp.norm", eps, offset),
        prefix=_QWEN,
        unread=(*copies, *(f"mtp.layers.{i}." for i in range(1, count))),
    )


def _numbered(recycles_normed: bool) -> Callable[[Fields, Sequence[LayerSpec], int], MTPSpec]:
    """DeepSeek and GLM: layers after the last one, with copies of the embedding and the output matrix."""

    def read(fields: Fields, layers: Sequence[LayerSpec], count: int) -> MTPSpec:
        name, eps = f"model.layers.{len(layers)}", norm_eps(fields)
        return MTPSpec(
            name=name,
            layer=layers[-1],
            embedding_norm=NormSpec(f"{name}.enorm", eps),
            state_norm=NormSpec(f"{name}.hnorm", eps),
            projection=f"{name}.eh_proj",
            final_norm=NormSpec(f"{name}.shared_head.norm", eps),
            zeroes_first=True,
            recycles_normed=recycles_normed,
            prefix=f"{name}.",
            unread=(f"{name}.embed_tokens.", f"{name}.shared_head.head."),
        )

    return read


_NUMBERED = ("num_mtp_layers", "num_nextn_predict_layers")


def numbered_prefixes(fields: Fields, layers: int) -> tuple[str, ...]:
    """Return the prefixes of layers after the last one. They draft tokens."""
    key = next((key for key in _NUMBERED if fields.present(key)), _NUMBERED[-1])
    drafts = fields.integer(key, 0, _MAX_LAYERS, 0)
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + drafts))


QWEN3 = MTPReader(_qwen, ("mtp_num_hidden_layers",), prefixes=(_QWEN,))
# Qwen3-Next's config.json does not mention the layer that its files have.
HYBRIDS = MTPReader(_qwen, ("mtp_num_hidden_layers", "num_nextn_predict_layers"), default=1, prefixes=(_QWEN,))
DEEPSEEK = MTPReader(_numbered(recycles_normed=True), _NUMBERED)
GLM = MTPReader(_numbered(recycles_normed=False), _NUMBERED)

"""LFM2: short convolutions in most layers, and experts in some models."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.recurrent.state import BLOCK
from aengine.model.families.parts import (
    MAX_WIDTH,
    attention,
    expert_count,
    expert_width,
    hidden_size,
    layer_count,
    layer_norms,
    norm_eps,
    recurrent_layers,
)
from aengine.model.fields import Fields
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import FFN, ExpertsSpec, MLPSpec
from aengine.model.spec.layer import LayerSpec, NormSpec
from aengine.model.spec.recurrent import ConvSpec

DEFAULTS: dict[str, object] = {"norm_eps": 1e-5, "num_key_value_heads": 8}
_BLOCK, _GATE, _UP, _DOWN = "feed_forward", "w1", "w3", "w2"  # names in checkpoints


def layers(fields: Fields) -> list[LayerSpec]:
    dense = _mlp(fields)
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        dense = replace(dense, inner=_adjusted(fields, dense.inner))
    return _layers(fields, [dense] * layer_count(fields))


def layers_with_experts(fields: Fields) -> list[LayerSpec]:
    """LFM2 whose first layers are dense. Experts are chosen by corrected sigmoids."""
    router = Router(
        top_k=fields.integer("num_experts_per_tok", 1, expert_count(fields)),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", 0, 1e6, 1.0),
    )
    corrected = fields.flag("use_expert_bias", default=True)
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields),
        router=router,
        correction="expert_bias" if corrected else "",
        block=_BLOCK,
        gate=_GATE,
        up=_UP,
        down=_DOWN,
    )
    dense, first = _mlp(fields), fields.integer("num_dense_layers", 0, 2**31, 2)
    return _layers(fields, [dense if i < first else experts for i in range(layer_count(fields))])


def ends(fields: Fields) -> EndsSpec:
    return EndsSpec(norm=NormSpec("model.embedding_norm", norm_eps(fields)))


def _mlp(fields: Fields) -> MLPSpec:
    key = "block_ff_dim" if fields.present("block_ff_dim") else "intermediate_size"
    inner = fields.integer(key, 1, MAX_WIDTH)
    return MLPSpec(inner=inner, block=_BLOCK, gate=_GATE, up=_UP, down=_DOWN)


def _adjusted(fields: Fields, inner: int) -> int:
    """Return two thirds of the width, times a factor, rounded up to a multiple."""
    inner = int(2 * inner / 3)
    inner = int(fields.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * inner)
    multiple = fields.integer("block_multiple_of", 1, MAX_WIDTH, 256)
    return -(-inner // multiple) * multiple


def _layers(fields: Fields, ffns: list[FFN]) -> list[LayerSpec]:
    conv = ConvSpec(
        channels=hidden_size(fields),
        conv=fields.integer("conv_L_cache", 1, BLOCK, 3),
        bias=fields.flag("conv_bias", default=False),
    )
    heads = replace(attention(fields, qk_norm="head", theta=1e6), out="out_proj", norms=("q_layernorm", "k_layernorm"))
    norms = layer_norms(fields, before_attention="operator_norm", before_ffn="ffn_norm")
    return [
        LayerSpec(attention=conv if is_conv else heads, ffn=ffn, norms=norms)
        for is_conv, ffn in zip(_conv_layers(fields), ffns, strict=True)
    ]


def _conv_layers(fields: Fields) -> list[bool]:
    """Return which layers have a convolution: as `layer_types` says, or all that are not in `full_attn_idxs`."""
    count = layer_count(fields)
    if not fields.present("layer_types"):
        full = fields.list_of_integers("full_attn_idxs")
        convolves = [layer not in full for layer in range(count)]
        if all(convolves):
            raise UnsupportedModelError(f"{fields.source}: full_attn_idxs without a layer are not supported")
        return convolves
    return recurrent_layers(fields, "conv")

"""Gemma 3n: several residual streams (AltUp), and gates that are sparse in the first layers.

As in Gemma 4, each layer reads a part of a second embedding, and the last layers read keys and values of earlier ones.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from aengine.model.families.gemma import GELU, cap, sandwich_norms
from aengine.model.families.gemma4 import keeper, layer_inputs, own_layers
from aengine.model.families.parts import (
    MAX_WIDTH,
    attention,
    hidden_size,
    layer_count,
    mlp,
    plain_ends,
    rope_sections,
    slides_by_layer,
    sliding_window,
)
from aengine.model.fields import Fields
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import MLPSpec
from aengine.model.spec.layer import AltUpSpec, LayerSpec

GEMMA3N: dict[str, object] = {
    "vocab_size": 262_400,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
_MAX_STREAMS = 64
_MAX_SPARSITY = 0.9999
# Used if the file does not say which layers are sparse: so many of the first ones, if there are more.
_SPARSE_LAYERS, _SPARSITY = 10, 0.95


def layers(fields: Fields) -> list[LayerSpec]:
    slides = slides_by_layer(fields, every=5)
    window, own, norms = sliding_window(fields), own_layers(fields), sandwich_norms(fields, offset=0.0)
    near, far = rope_sections(fields)
    # A rope_theta outside of the sections is for the layers without a window.
    local = fields.number("rope_local_base_freq", 1.0, 1e15, 10_000.0)
    sliding, full = _heads(fields.without("rope_theta"), near, local), _heads(fields, far, 1_000_000.0)
    altup, last = _altup(fields), layer_count(fields) - 1
    return [
        LayerSpec(
            attention=replace(
                sliding if slide else full,
                window=window if slide else None,
                shares_kv_of=None if i < own else keeper(fields, slides[:own], slide),
            ),
            ffn=ffn,
            norms=norms,
            input_width=fields.integer("hidden_size_per_layer_input", 1, MAX_WIDTH),
            altup=replace(altup, first=i == 0, last=i == last),
        )
        for i, (slide, ffn) in enumerate(zip(slides, _mlps(fields)))
    ]


def ends(fields: Fields) -> EndsSpec:
    return replace(
        plain_ends(fields),
        embedding_scale=math.sqrt(hidden_size(fields)),
        logit_softcap=cap(fields, "final_logit_softcapping"),
        layer_inputs=layer_inputs(fields, partial=True),
    )


def _heads(fields: Fields, rope: Fields | None, theta: float) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=False)
    heads = attention(
        fields,
        head_dim=256,
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        rope=rope,
        theta=theta,
        scale=1.0,
    )
    return replace(heads, v_norm=True)


def _mlps(fields: Fields) -> list[MLPSpec]:
    """Return the MLP of each layer. Their widths and sparsities may differ."""
    count, key = layer_count(fields), "intermediate_size"
    listed = fields.present(key) and not fields.is_integer(key)
    widths = fields.integers(key, count, 1, MAX_WIDTH) if listed else (fields.integer(key, 1, MAX_WIDTH),) * count
    if fields.present("activation_sparsity_pattern"):
        sparsities = fields.numbers("activation_sparsity_pattern", count, 0.0, _MAX_SPARSITY)
    else:
        sparse = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        sparsities = (_SPARSITY,) * sparse + (0.0,) * (count - sparse)
    dense = mlp(fields.without(key).with_defaults({key: widths[0]}), activations=GELU, key="hidden_activation")
    return [replace(dense, inner=width, sparsity=sparsity) for width, sparsity in zip(widths, sparsities)]


def _altup(fields: Fields) -> AltUpSpec:
    count = fields.integer("altup_num_inputs", 2, _MAX_STREAMS, 4)
    return AltUpSpec(
        count=count,
        active=fields.integer("altup_active_idx", 0, count - 1, 0),
        rank=fields.integer("laurel_rank", 1, MAX_WIDTH),
        scaled=fields.flag("altup_correct_scale", default=True),
    )

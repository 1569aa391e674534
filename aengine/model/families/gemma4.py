"""Gemma 4: Gemma 3 with other heads in layers without a window. In these layers, values may equal keys.

Some layers read the keys and values of earlier layers. Some models have a second embedding, of which each layer reads a
part.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.families.gemma import GELU, cap, sandwich_norms
from aengine.model.families.parts import (
    MAX_WIDTH,
    attention,
    expert_count,
    expert_width,
    hidden_size,
    layer_count,
    mlp,
    plain_ends,
    rope_sections,
    slides_by_layer,
    sliding_window,
    softmax_router,
)
from aengine.model.fields import Fields, shown
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec, LayerInputsSpec
from aengine.model.spec.feed_forward import FFN, ExpertsSpec, MLPAndExpertsSpec, MLPSpec
from aengine.model.spec.layer import LayerSpec

_VOCAB = 262_144
UNIFIED: dict[str, object] = {
    "vocab_size": _VOCAB,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "hidden_size_per_layer_input": 0,
}
GEMMA4: dict[str, object] = {
    **UNIFIED,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
# Used if the file has no rope_parameters: for layers with a window, and for layers without one.
_ROPES: dict[str, object] = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def layers(fields: Fields) -> list[LayerSpec]:
    if fields.present("use_bidirectional_attention") and fields.text("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(f"{fields.source}: use_bidirectional_attention all is not supported")
    slides = slides_by_layer(fields, every=6)
    slides[-1] = False  # the last layer never has a window, whatever the file says
    window, heads, own = sliding_window(fields), _heads(fields, slides), own_layers(fields)
    dense = mlp(fields, activations=GELU, key="hidden_activation")
    wide = replace(dense, inner=2 * dense.inner) if fields.flag("use_double_wide_mlp", default=False) else dense
    inputs, norms = layer_inputs(fields), sandwich_norms(fields, offset=0.0)
    return [
        LayerSpec(
            attention=replace(
                heads[i],
                window=window if slide else None,
                shares_kv_of=None if i < own else keeper(fields, slides[:own], slide),
            ),
            ffn=_ffn(fields, dense if i < own else wide),
            norms=norms,
            input_width=0 if inputs is None else inputs.width,
            scalar=True,
        )
        for i, slide in enumerate(slides)
    ]


def ends(fields: Fields) -> EndsSpec:
    return replace(
        plain_ends(fields),
        embedding_scale=math.sqrt(hidden_size(fields)),
        logit_softcap=cap(fields, "final_logit_softcapping"),
        layer_inputs=layer_inputs(fields),
    )


def _heads(fields: Fields, slides: list[bool]) -> list[AttentionSpec]:
    """Return the heads of each layer."""
    if not fields.present("rope_parameters"):
        fields = fields.without("rope_parameters").with_defaults({"rope_parameters": _ROPES})
    near, far = rope_sections(fields)
    equal = fields.flag("attention_k_eq_v", default=False)
    bias = fields.flag("attention_bias", default=False)
    found = []
    for layer, slide in enumerate(slides):
        heads = attention(
            _of_layer(fields, layer, slide, equal).with_defaults(dict(fields.items())),
            head_dim=256,
            qk_norm="head",
            qkv_bias=bias,
            out_bias=bias,
            rope=near if slide else far,
            theta=10_000.0 if slide else 1_000_000.0,
            scale=1.0,
            partial=not slide,
        )
        found.append(replace(heads, v_norm=True, keys_are_values=equal and not slide))
    return found


def _of_layer(fields: Fields, layer: int, slide: bool, equal: bool) -> Fields:
    """Return a layer's own settings. transformers writes them for each layer, the publisher for each kind of layer."""
    by_layer = fields.section("per_layer_config")
    if by_layer is not None:
        found = [
            key for key in by_layer.names() if key.isdecimal() and int(key) == layer
        ]  # keys are padded: "05" if there are ten layers or more
        settings = next((by_layer.section(key) for key in found), None) or Fields({}, fields.source)
        if unknown := set(settings.names()) - {"head_dim", "num_key_value_heads"}:
            raise UnsupportedModelError(f"{settings.source}: {shown(min(unknown))} of one layer is not supported")
        return settings
    if slide:
        return Fields({}, fields.source)
    values: dict[str, object] = {"head_dim": fields.integer("global_head_dim", 2, MAX_WIDTH, 512)}
    if equal and fields.present("num_global_key_value_heads"):
        values["num_key_value_heads"] = fields.integer("num_global_key_value_heads", 1, MAX_WIDTH)
    return Fields(values, fields.source)


def own_layers(fields: Fields) -> int:
    """Return how many layers store keys and values. All later layers read keys and values of these layers."""
    count = layer_count(fields)
    return count - fields.integer("num_kv_shared_layers", 0, count - 1, 0)


def keeper(fields: Fields, slides: list[bool], slide: bool) -> int:
    """Return the index of the last layer of the same kind, with or without a window. Its K and V are shared."""
    found = [layer for layer, one in enumerate(slides) if one == slide]
    if not found:
        raise fields.fail("num_kv_shared_layers", "leaves no layer whose keys and values the others of its kind share")
    return found[-1]


def _ffn(fields: Fields, dense: MLPSpec) -> FFN:
    if not fields.flag("enable_moe_block", default=False):
        return dense
    top_k = fields.integer("top_k_experts", 1, MAX_WIDTH)
    chosen = fields.without("hidden_act").with_defaults({"num_experts_per_tok": top_k})
    experts = ExpertsSpec(
        router_name="router.proj",
        count=expert_count(chosen),
        inner=expert_width(chosen),
        router=softmax_router(chosen, renormalise=True),
        activation="gelu",
    )
    return MLPAndExpertsSpec(mlp=dense, experts=experts)


def layer_inputs(fields: Fields, partial: bool = False) -> LayerInputsSpec | None:
    """Return the second embedding. None: there is none. partial: whether its table may have fewer tokens."""
    width = fields.integer("hidden_size_per_layer_input", 0, MAX_WIDTH, 0)
    if not width:
        return None
    vocab = fields.integer("vocab_size_per_layer_input", 1, 2**21, _VOCAB)
    if vocab < fields.vocab_size and not partial:
        raise fields.fail("vocab_size_per_layer_input", f"({vocab}) is below vocab_size ({fields.vocab_size})")
    if width * layer_count(fields) > MAX_WIDTH:
        raise fields.fail("hidden_size_per_layer_input", f"times the layers is more than {MAX_WIDTH}")
    return LayerInputsSpec(vocab=vocab, width=width, partial=vocab < fields.vocab_size)

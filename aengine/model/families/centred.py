"""Families whose norms subtract the mean (LayerNorm)."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.model.families.parts import (
    attention,
    expert_count,
    expert_width,
    known_activation,
    layer_norms,
    layers_of,
    mlp,
    norm_eps,
    slides_by_layer,
    sliding_window,
)
from aengine.model.families.plain import window_in_all_layers
from aengine.model.fields import Fields
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import LayerNorms, LayerSpec, NormSpec

_MAX_SCALE = 1e6
COHERE: dict[str, object] = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
COHERE_FIXED: dict[str, object] = {
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_parallel_block": True,
    "use_gated_activation": True,
}
COHERE2 = COHERE | {"sliding_window": 4096}
STARCODER2: dict[str, object] = {"norm_epsilon": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2}
PHI_MOE: dict[str, object] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8}


def cohere(fields: Fields) -> list[LayerSpec]:
    """Command R: attention and MLP read the same norm; pairs of neighbours are rotated."""
    heads = _cohere_heads(fields, theta=500_000.0)
    if fields.flag("use_qk_norm", default=False):
        heads = replace(heads, qk_norm="centred")
    return _parallel(layers_of(fields, heads, mlp(fields), norms=_cohere_norms(fields)))


def cohere2(fields: Fields) -> list[LayerSpec]:
    """Command R7B and A: a window and a rotation in three of four layers, neither in the others."""
    every = fields.integer("sliding_window_pattern", 1, 2**31, 4) if not fields.present("layer_types") else 1
    window, slides = sliding_window(fields), slides_by_layer(fields, every)
    rotated = _cohere_heads(fields)
    # transformers rotates only layers that have a window.
    kinds = [slide and window is not None for slide in slides]
    windows = [window if slide else None for slide in kinds]

    def heads(layer: int) -> AttentionSpec:
        return rotated if kinds[layer] else replace(rotated, rope=None)

    return _parallel(layers_of(fields, heads, mlp(fields), windows, _cohere_norms(fields)))


def cohere_ends(fields: Fields) -> EndsSpec:
    scale = fields.number("logit_scale", 0, _MAX_SCALE)
    return EndsSpec(norm=NormSpec("model.norm", norm_eps(fields), centred=True), logit_scale=scale)


def _cohere_heads(fields: Fields, theta: float = 10_000.0) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=False)
    return attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, interleaved=True, theta=theta)


def _cohere_norms(fields: Fields) -> LayerNorms:
    return layer_norms(fields, before_ffn=None, centred=True)


def _parallel(layers: list[LayerSpec]) -> list[LayerSpec]:
    return [replace(layer, parallel=True) for layer in layers]


def starcoder2(fields: Fields) -> list[LayerSpec]:
    """StarCoder2: norms with biases, an MLP without a gate, biases everywhere."""
    bias = fields.flag("use_bias", default=True)
    known_activation(fields, {"gelu_pytorch_tanh": "gelu"})
    inner = mlp(fields, bias, activations={"gelu_pytorch_tanh": "gelu"})
    heads = attention(fields, qkv_bias=bias, out_bias=bias)
    window = window_in_all_layers(fields) if fields.present("sliding_window") else None
    ffn = replace(inner, gated=False, up="c_fc", down="c_proj")
    return layers_of(fields, heads, ffn, window, layer_norms(fields, centred=True, bias=True))


def starcoder2_ends(fields: Fields) -> EndsSpec:
    return EndsSpec(norm=NormSpec("model.norm", norm_eps(fields), centred=True, bias=True))


def phi_moe(fields: Fields) -> list[LayerSpec]:
    """Phi-3.5-MoE: norms with biases; two experts, chosen one after the other; longrope with factors of its own."""
    bias = fields.flag("attention_bias", default=False)
    if fields.integer("num_experts_per_tok", 1, 64, 2) != 2:
        raise UnsupportedModelError(f"{fields.source}: num_experts_per_tok other than 2 is not supported")
    jitter = fields.number("router_jitter_noise", 0, 1, 0.01)
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=Router(top_k=2, scoring="sparsemixer", jitter=jitter),
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, rope=_phi_rope(fields), theta=1e6)
    window = window_in_all_layers(fields) if fields.present("sliding_window") else None
    return layers_of(fields, heads, experts, window, layer_norms(fields, centred=True, bias=True))


def _phi_rope(fields: Fields) -> Fields | None:
    """Return the rotation's settings. short_mscale and long_mscale take the place of attention_factor."""
    section = fields.section("rope_scaling") or fields.section("rope_parameters")
    if section is None or not section.present("long_mscale"):
        return section
    factor = section.number("long_mscale", 0, 1e3)
    if section.number("short_mscale", 0, 1e3) != factor:
        raise UnsupportedModelError(f"{section.source}: short_mscale that differs from long_mscale is not supported")
    return Fields(dict(section.items()) | {"attention_factor": factor}, section.source)


def phi_moe_ends(fields: Fields) -> EndsSpec:
    norm = NormSpec("model.norm", norm_eps(fields), centred=True, bias=True)
    return EndsSpec(norm=norm, logit_bias=fields.flag("lm_head_bias", default=False))

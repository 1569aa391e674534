"""Families whose layers all have attention over keys and values and an MLP."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.families.parts import (
    attention,
    layer_count,
    layer_norms,
    layer_types,
    layers_of,
    mlp,
    plain_ends,
    rope_sections,
    slides_by_layer,
    sliding_window,
    windows_by_layer,
)
from aengine.model.fields import Fields
from aengine.model.rope import MAX_POSITIONS, QueryGrowth
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.layer import LayerNorms, LayerSpec

MAX_MULTIPLIER = 1e6
GLM: dict[str, object] = {"num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07}
ERNIE_MOE: dict[str, object] = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
ERNIE = ERNIE_MOE | {"num_key_value_heads": 2, "head_dim": 128}
EPS: dict[str, object] = {"rms_norm_eps": 1e-5}
MINISTRAL3 = EPS | {
    "rope_theta": 1e6,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
APERTUS: dict[str, object] = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
SEED_OSS: dict[str, object] = {"num_key_value_heads": 8, "head_dim": 128}
SMOLLM3: dict[str, object] = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 4,
    "max_window_layers": 2**31,
    "sliding_window": None,
}


def llama(fields: Fields) -> list[LayerSpec]:
    """Llama 2 and 3: biases if config.json says so, no window."""
    bias = fields.flag("attention_bias", default=False)
    # Old files leave out the number of KV heads. It then equals the number of heads.
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias)
    return layers_of(fields, heads, mlp(fields, bias=fields.flag("mlp_bias", default=False)))


def mistral(fields: Fields) -> list[LayerSpec]:
    """Mistral: a sliding window in all layers, or in none."""
    return layers_of(fields, attention(fields), mlp(fields), window_in_all_layers(fields))


def window_in_all_layers(fields: Fields) -> list[int | None]:
    """Return the window of each layer, the same for all layers."""
    window = sliding_window(fields)
    windows = [window] * layer_count(fields)
    if fields.present("layer_types") and layer_types(fields) != [window is not None] * len(windows):
        raise UnsupportedModelError(f"{fields.source}: layer_types that differ from sliding_window are not supported")
    return windows


def ministral3(fields: Fields) -> list[LayerSpec]:
    """Ministral 3: Mistral whose queries grow with their position."""
    window = window_in_all_layers(fields) if fields.present("sliding_window") else None
    heads = replace(attention(fields, head_dim=128), growth=_growth(fields))
    return layers_of(fields, heads, mlp(fields), window)


def _growth(fields: Fields) -> QueryGrowth | None:
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    if rope is None or not rope.present("llama_4_scaling_beta"):
        return None
    return QueryGrowth(
        beta=rope.number("llama_4_scaling_beta", 0, 1e3),
        positions=rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS),
    )


def qwen2(fields: Fields) -> list[LayerSpec]:
    """Qwen2 and 2.5: biases of queries, keys and values; a sliding window in some layers."""
    return layers_of(fields, attention(fields, qkv_bias=True), mlp(fields), windows_by_layer(fields))


def qwen3(fields: Fields) -> list[LayerSpec]:
    """Qwen3: norms of each query and key head; head_dim is 128 if config.json does not give it."""
    return layers_of(fields, qwen3_heads(fields, head_dim=128), mlp(fields), windows_by_layer(fields))


def qwen3_heads(fields: Fields, head_dim: int | None = None) -> AttentionSpec:
    """head_dim: used if the file does not give it."""
    bias = fields.flag("attention_bias", default=False)
    return attention(fields, qk_norm="head", head_dim=head_dim, qkv_bias=bias, out_bias=bias)


def phi3(fields: Fields) -> list[LayerSpec]:
    """Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another; a part of each head rotated; longrope."""
    heads = attention(fields, kv_heads_default=True, fused=True, partial=True)
    window = window_in_all_layers(fields) if fields.present("sliding_window") else None
    return layers_of(fields, heads, mlp(fields, fused=True), window)


def glm(fields: Fields) -> list[LayerSpec]:
    """GLM-4-9B: half of each head rotated, as pairs of neighbours; biases before attention; fused gate and up."""
    return layers_of(fields, _glm_heads(fields), mlp(fields, fused=True))


def glm4(fields: Fields) -> list[LayerSpec]:
    """GLM-4-0414 and GLM-Z1: GLM-4-9B with norms after attention and MLP, too."""
    return layers_of(fields, _glm_heads(fields), mlp(fields, fused=True), norms=_glm_norms(fields))


def glm4v(fields: Fields) -> list[LayerSpec]:
    """The language model of GLM-4.1V: GLM-4-0414, whose files say what part of a head is rotated."""
    heads = attention(fields, qkv_bias=True, partial=True, interleaved=True)
    return layers_of(fields, heads, mlp(fields, fused=True), norms=_glm_norms(fields))


def _glm_heads(fields: Fields) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=True)
    return attention(fields, head_dim=128, qkv_bias=bias, partial=True, part=0.5, interleaved=True)


def _glm_norms(fields: Fields) -> LayerNorms:
    return layer_norms(fields, after_attention="post_self_attn_layernorm", after_ffn="post_mlp_layernorm")


def ernie4_5(fields: Fields) -> list[LayerSpec]:
    """ERNIE 4.5: Llama that rotates pairs of neighbours."""
    bias = fields.flag("use_bias", default=False)
    return layers_of(fields, ernie_heads(fields, bias), mlp(fields, bias=bias))


def ernie_heads(fields: Fields, bias: bool) -> AttentionSpec:
    return attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, interleaved=True, theta=5e5)


def apertus(fields: Fields) -> list[LayerSpec]:
    """Apertus: Llama with norms of each query and key head, and an MLP without a gate, activated by xIELU."""
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, kv_heads_default=True, qk_norm="head", qkv_bias=bias, out_bias=bias, theta=12e6)
    ffn = replace(mlp(fields, activations={"xielu": "xielu"}), gated=False)
    norms = layer_norms(fields, before_attention="attention_layernorm", before_ffn="feedforward_layernorm")
    return layers_of(fields, heads, ffn, norms=norms)


def granite(fields: Fields) -> list[LayerSpec]:
    """Granite: Llama with factors for embeddings, attention scores, residuals and logits."""
    bias = fields.flag("attention_bias", default=False)
    scale = fields.number("attention_multiplier", 0, MAX_MULTIPLIER, 1.0)
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, scale=scale)
    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    residual_scale = fields.number("residual_multiplier", 0, MAX_MULTIPLIER, 1.0)
    return layers_of(fields, heads, ffn, residual_scale=residual_scale)


def granite_ends(fields: Fields) -> EndsSpec:
    return replace(
        plain_ends(fields),
        embedding_scale=fields.number("embedding_multiplier", 0, MAX_MULTIPLIER, 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1 / MAX_MULTIPLIER, MAX_MULTIPLIER, 1.0),
    )


def smollm3(fields: Fields) -> list[LayerSpec]:
    """SmolLM3: Llama without a rotation in every fourth layer."""
    bias = fields.flag("attention_bias", default=False)
    rotated = attention(fields, qkv_bias=bias, out_bias=bias, theta=2_000_000.0)
    rotates = rotated_layers(fields)

    def heads(layer: int) -> AttentionSpec:
        return rotated if rotates[layer] else replace(rotated, rope=None)

    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    return layers_of(fields, heads, ffn, windows_by_layer(fields))


def rotated_layers(fields: Fields) -> list[bool]:
    """Return which layers rotate. Despite its name, `no_rope_layers` has a 1 for layers that rotate."""
    count = layer_count(fields)
    if fields.present("no_rope_layers"):
        return [flag == 1 for flag in fields.integers("no_rope_layers", count, 0, 1)]
    interval = fields.integer("no_rope_layer_interval", 1, 2**31, 4)
    return [(layer + 1) % interval != 0 for layer in range(count)]


def seed_oss(fields: Fields) -> list[LayerSpec]:
    """Seed-OSS: Llama with its own head_dim, and a bias before attention but none after it."""
    heads = attention(
        fields,
        kv_heads_default=True,
        qkv_bias=fields.flag("attention_bias", default=True),
        out_bias=fields.flag("attention_out_bias", default=False),
    )
    return layers_of(fields, heads, mlp(fields, bias=fields.flag("mlp_bias", default=False)))


def olmo2(fields: Fields) -> list[LayerSpec]:
    """OLMo 2: norms after attention and MLP, none before them; one norm over all query heads, one over all keys."""
    return layers_of(fields, _olmo_heads(fields), mlp(fields), norms=_olmo_norms(fields))


def olmo3(fields: Fields) -> list[LayerSpec]:
    """OLMo 3: OLMo 2 with a sliding window in three of four layers. Their rotation is never scaled."""
    slides = slides_by_layer(fields, every=4)
    near, far = (_olmo_heads(fields, rope, theta=500_000.0) for rope in rope_sections(fields))
    window = sliding_window(fields)
    windows = [window if slide else None for slide in slides]
    return layers_of(fields, lambda i: near if slides[i] else far, mlp(fields), windows, _olmo_norms(fields))


def exaone4(fields: Fields) -> list[LayerSpec]:
    """EXAONE 4: OLMo 2's norms, norms of each query and key head. With windows, only layers with a window rotate."""
    rotated = attention(fields, kv_heads_default=True, qk_norm="head")
    window = sliding_window(fields)
    every = fields.integer("sliding_window_pattern", 1, 2**31, 4) if not fields.present("layer_types") else 1
    slides = [False] * layer_count(fields) if window is None else slides_by_layer(fields, every)
    still = rotated if window is None else replace(rotated, rope=None)
    windows = [window if slide else None for slide in slides]
    return layers_of(fields, lambda i: rotated if slides[i] else still, mlp(fields), windows, _olmo_norms(fields))


def internlm3(fields: Fields) -> list[LayerSpec]:
    """InternLM 3: Llama whose files have `qkv_bias`, and `bias` for the last projection of attention and the MLP."""
    bias = fields.flag("bias", default=fields.flag("mlp_bias", default=False))
    qkv_bias = fields.flag("qkv_bias", default=fields.flag("attention_bias", default=False))
    heads = attention(fields, kv_heads_default=True, head_dim=128, qkv_bias=qkv_bias, out_bias=bias)
    return layers_of(fields, heads, mlp(fields, bias=bias))


def _olmo_norms(fields: Fields) -> LayerNorms:
    return layer_norms(
        fields,
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_ffn=None,
        after_ffn="post_feedforward_layernorm",
    )


def _olmo_heads(fields: Fields, rope: Fields | None = None, theta: float = 10_000.0) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=False)
    return attention(fields, kv_heads_default=True, qk_norm="all", qkv_bias=bias, out_bias=bias, rope=rope, theta=theta)

"""Gemma 2 and 3: norms before and after attention and MLP, with weights 1 + w; GELU; a window in most layers."""

from __future__ import annotations

import math

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.families.parts import (
    attention,
    hidden_size,
    layer_norms,
    layers_of,
    mlp,
    plain_ends,
    rope_sections,
    slides_by_layer,
    sliding_window,
)
from aengine.model.fields import Fields
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import Activation
from aengine.model.spec.layer import LayerNorms, LayerSpec

_OFFSET = 1.0  # norm weights are stored as their difference from 1
GELU: dict[str, Activation] = {"gelu_pytorch_tanh": "gelu"}
_COMMON: dict[str, object] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
GEMMA2: dict[str, object] = {
    **_COMMON,
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 256_000,
}
# Gemma 3's files leave out values that are defaults of its config class in transformers.
GEMMA3: dict[str, object] = {
    **_COMMON,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_208,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def gemma2(fields: Fields) -> list[LayerSpec]:
    heads = _heads(fields)
    slides = slides_by_layer(fields, every=2)
    return _layers(fields, heads, heads, slides)


def gemma3(fields: Fields) -> list[LayerSpec]:
    if fields.flag("use_bidirectional_attention", default=False):
        raise UnsupportedModelError(f"{fields.source}: use_bidirectional_attention is not supported")
    near, far = rope_sections(fields)
    local = fields.number("rope_local_base_freq", 1.0, 1e15, 10_000.0)
    # A rope_theta outside of the sections is for the layers without a window.
    sliding = _heads(fields.without("rope_theta"), qk_norm=True, rope=near, theta=local)
    full = _heads(fields, qk_norm=True, rope=far, theta=1_000_000.0)
    slides = slides_by_layer(fields, every=fields.integer("sliding_window_pattern", 1, 2**31, 6))
    return _layers(fields, sliding, full, slides)


def ends(fields: Fields) -> EndsSpec:
    return replace(
        plain_ends(fields, norm_offset=_OFFSET),
        embedding_scale=math.sqrt(hidden_size(fields)),
        logit_softcap=cap(fields, "final_logit_softcapping"),
    )


def sandwich_norms(fields: Fields, offset: float) -> LayerNorms:
    """Return norms before and after attention, and before and after the feed-forward part."""
    return layer_norms(
        fields,
        after_attention="post_attention_layernorm",
        before_ffn="pre_feedforward_layernorm",
        after_ffn="post_feedforward_layernorm",
        offset=offset,
    )


def _heads(fields: Fields, qk_norm: bool = False, rope: Fields | None = None, theta: float = 10_000.0) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=False)
    return attention(
        fields,
        head_dim=256,
        qk_norm="head" if qk_norm else "none",
        qk_norm_offset=_OFFSET,
        qkv_bias=bias,
        out_bias=bias,
        rope=rope,
        theta=theta,
        scale=fields.number("query_pre_attn_scalar", 1e-6, 1e6) ** -0.5,
        softcap=cap(fields, "attn_logit_softcapping"),
    )


def _layers(fields: Fields, sliding: AttentionSpec, full: AttentionSpec, slides: list[bool]) -> list[LayerSpec]:
    window = sliding_window(fields)
    ffn = mlp(fields, activations=GELU, key="hidden_activation")
    windows = [window if slide else None for slide in slides]
    norms = sandwich_norms(fields, _OFFSET)
    return layers_of(fields, lambda i: sliding if slides[i] else full, ffn, windows, norms)


def cap(fields: Fields, key: str) -> float | None:
    return fields.number(key, 1e-3, 1e6) if fields.present(key) else None

"""Muse Glimmer: Gemma's four norms, gates with a projection of their own, no rotation in layers without a window."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.families.parts import (
    attention,
    layer_count,
    layer_types,
    layers_of,
    mlp,
    norm_eps,
    plain_ends,
    sliding_window,
)
from aengine.model.fields import Fields
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.layer import LayerNorms, LayerSpec, NormSpec

GLIMMER: dict[str, object] = {
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "sliding_window": 2048,
    "final_logit_softcapping": 20.0,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
    "eos_token_id": 200_001,
    "bos_token_id": 200_000,
}
_OFFSET = 1.0  # weights of norms within layers are stored as their difference from 1
_EVERY = 4  # counted from the last layer, one in this many has neither a window nor a rotation, unless the file differs


def layers(fields: Fields) -> list[LayerSpec]:
    if fields.flag("attention_bias", default=False):  # the gate would have none
        raise UnsupportedModelError(f"{fields.source}: attention_bias is not supported")
    heads = attention(fields)
    factor = fields.number("qk_scale_factor", 1e-6, 1e6)  # of queries
    heads = replace(
        heads,
        qk_norm="head",
        qk_norm_weight=False,
        gate=True,
        gate_proj=True,
        scale=factor * heads.head_dim**-0.5,
    )
    still = replace(heads, rope=None)
    rotated = _rotated(fields, 0.0 if heads.rope is None else heads.rope.theta)
    return layers_of(
        fields,
        lambda i: heads if rotated[i] else still,
        mlp(fields, key="hidden_activation"),
        _windows(fields),
        _norms(fields),
    )


def ends(fields: Fields) -> EndsSpec:
    return replace(
        plain_ends(fields),
        embedding_norm_eps=norm_eps(fields),
        logit_scale=fields.number("output_multiplier", 1e-6, 1e6),
        logit_softcap=fields.number("final_logit_softcapping", 1e-3, 1e6),
    )


def _rotated(fields: Fields, theta: float) -> list[bool]:
    """Return which layers have a rotation. Their theta must be the model's: transformers computes no other one."""
    if not fields.present("layer_rope_theta"):
        return _most(fields)
    thetas = fields.numbers("layer_rope_theta", layer_count(fields), 0, 1e15)
    if not {*thetas} <= {0.0, theta}:
        raise UnsupportedModelError(
            f"{fields.source}: layer_rope_theta with other values than 0 and rope_theta ({theta:g}) is not supported"
        )
    return [one != 0 for one in thetas]


def _windows(fields: Fields) -> list[int | None]:
    slides = layer_types(fields) if fields.present("layer_types") else _most(fields)
    window = sliding_window(fields)
    if any(slides) and window is None:
        raise fields.fail("sliding_window", "is null, while some layers have a window")
    return [window if slide else None for slide in slides]


def _most(fields: Fields) -> list[bool]:
    """Return False for every fourth layer, counted from the last one, and True for all others."""
    count = layer_count(fields)
    return [(count - 1 - layer) % _EVERY != 0 for layer in range(count)]


def _norms(fields: Fields) -> LayerNorms:
    before, after = norm_eps(fields), fields.number("post_norm_eps", 0, 1)
    return LayerNorms(
        before_attention=NormSpec("input_layernorm", before, _OFFSET),
        after_attention=NormSpec("post_attention_layernorm", after, _OFFSET),
        before_ffn=NormSpec("pre_feedforward_layernorm", before, _OFFSET),
        after_ffn=NormSpec("post_feedforward_layernorm", after, _OFFSET),
    )

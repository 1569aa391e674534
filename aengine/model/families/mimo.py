"""MiMo-V2-Flash: a window and sinks in most layers, values that are narrower than keys, and experts."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.families.mixtures import sigmoid_experts, sparse_by_type
from aengine.model.families.parts import (
    MAX_HEADS,
    MAX_WIDTH,
    attention,
    layer_count,
    layers_of,
    mlp,
    rope_sections,
    slides_by_layer,
)
from aengine.model.fields import Fields
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.layer import LayerSpec

FLASH: dict[str, object] = {
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "rms_norm_eps": 1e-5,
    "attention_value_scale": 0.707,
    "max_position_embeddings": 131_072,
}
_ROTATED = 0.334  # the part of a head
# Keys of published files for layers with a window, if they must be like those of all layers.
_SAME = {"swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim", "swa_num_attention_heads": "num_attention_heads"}


def flash(fields: Fields) -> list[LayerSpec]:
    for key, same in _SAME.items():
        if fields.present(key) and fields.integer(key, 1, MAX_WIDTH) != fields.integer(same, 1, MAX_WIDTH):
            raise UnsupportedModelError(f"{fields.source}: {key} differs from {same}, which is not supported")
    slides, sparse = _slides(fields), _sparse(fields)
    near, far = _heads(fields, near=True), _heads(fields, near=False)
    window = fields.integer("sliding_window", 1, 2**31)
    if fields.present("sliding_window_size"):  # tokens before a query's own
        window = fields.integer("sliding_window_size", 1, 2**31) + 1
    dense, experts = mlp(fields), replace(sigmoid_experts(fields), shared=None)
    windows = [window if slide else None for slide in slides]
    return layers_of(fields, lambda i: near if slides[i] else far, lambda i: experts if sparse[i] else dense, windows)


def _heads(fields: Fields, near: bool) -> AttentionSpec:
    """Return the heads of layers with a window, or of those without one."""
    rope, theta = rope_sections(fields)[0 if near else 1], 10_000.0 if near else 5e6
    if near:
        twice = 2 * fields.integer("num_key_value_heads", 1, MAX_HEADS)
        heads = fields.integer("swa_num_key_value_heads", 1, MAX_HEADS, twice)
        theta = fields.number("swa_rope_theta", 1.0, 1e15, theta)
        # The rope_theta outside of the sections is for layers without a window.
        fields = fields.without("rope_theta").without("num_key_value_heads")
        fields = fields.with_defaults({"num_key_value_heads": heads})
    bias = fields.flag("attention_bias", default=False)
    spec = attention(fields, qkv_bias=bias, rope=rope, theta=theta, partial=True, part=_ROTATED)
    key = "add_swa_attention_sink_bias" if near else "add_full_attention_sink_bias"
    return replace(
        spec,
        sinks=fields.flag(key, default=near),
        value_dim=fields.integer("v_head_dim", 1, spec.head_dim),
        value_scale=fields.number("attention_value_scale", 0, 1e3, 1.0),
    )


def _slides(fields: Fields) -> list[bool]:
    """Return which layers have a window: by default all but the first and every sixth layer."""
    count = layer_count(fields)
    if fields.present("hybrid_layer_pattern"):
        return [flag == 1 for flag in fields.integers("hybrid_layer_pattern", count, 0, 1)]
    slides = slides_by_layer(fields, every=6)
    return slides if fields.present("layer_types") else [False, *slides[1:]]


def _sparse(fields: Fields) -> list[bool]:
    """Return which layers have experts: by default all but the first one."""
    if fields.present("moe_layer_freq"):
        return [flag == 1 for flag in fields.integers("moe_layer_freq", layer_count(fields), 0, 1)]
    return sparse_by_type(fields)

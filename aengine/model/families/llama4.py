"""Llama 4: attention within chunks in most layers, no rotation in the others, and experts in some layers or in all."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.model.families.parts import (
    MAX_WIDTH,
    attention,
    expert_count,
    expert_width,
    layer_count,
    layer_types,
    layers_of,
    mlp,
)
from aengine.model.families.plain import rotated_layers
from aengine.model.fields import Fields
from aengine.model.rope import MAX_POSITIONS, QueryGrowth
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import LayerSpec

LLAMA4: dict[str, object] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "attention_chunk_size": 8192,
}
_BLOCK = "feed_forward"


def layers(fields: Fields) -> list[LayerSpec]:
    if fields.present("no_rope_layers") and not fields.list_of_integers("no_rope_layers"):
        fields = fields.without("no_rope_layers")  # an empty list stands for the default
    rotates = rotated_layers(fields)
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, interleaved=True, theta=5e5)
    rotated, still = heads, replace(heads, rope=None, growth=_growth(fields))
    if fields.flag("use_qk_norm", default=True):
        # The norms come after the rotation in transformers. A rotation does not change the length of a head.
        rotated = replace(heads, qk_norm="head", qk_norm_weight=False)
    chunks = _chunks_by_layer(fields, rotates)

    def heads_of(layer: int) -> AttentionSpec:
        return replace(rotated if rotates[layer] else still, chunked=chunks[layer] is not None)

    shared = replace(mlp(fields), block=_BLOCK)
    dense = replace(shared, inner=fields.integer("intermediate_size_mlp", 1, MAX_WIDTH, 16_384))
    if (top_k := fields.integer("num_experts_per_tok", 1, 2**31, 1)) != 1:
        raise UnsupportedModelError(f"{fields.source}: num_experts_per_tok {top_k} is not supported, only 1")
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=Router(top_k=1, scoring="sigmoid_of_chosen"),
        weighs_inputs=True,
        transposed=True,
        shared=shared,
        block=_BLOCK,
        router_name="router",
    )
    sparse = _sparse_layers(fields)
    return layers_of(fields, heads_of, lambda i: experts if i in sparse else dense, chunks)


def _growth(fields: Fields) -> QueryGrowth | None:
    """Return the growth of queries in layers without a rotation. Some files have a number as the flag."""
    key = "attn_temperature_tuning"
    if not (fields.integer(key, 0, 2**31) if fields.is_integer(key) else fields.flag(key, default=True)):
        return None
    return QueryGrowth(
        beta=fields.number("attn_scale", 0, 1e3, 0.1),
        positions=fields.integer("floor_scale", 1, MAX_POSITIONS, 8192),
        shift=1,
    )


def _chunks_by_layer(fields: Fields, rotates: list[bool]) -> list[int | None]:
    """Return the positions of a chunk in each layer. Without layer_types, the layers that rotate have chunks."""
    size = fields.integer("attention_chunk_size", 1, 2**31) if fields.present("attention_chunk_size") else None
    if not fields.present("layer_types"):
        return [size if rotated else None for rotated in rotates]
    chunked = layer_types(fields, "chunked_attention")
    if size is None and any(chunked):
        raise fields.fail("attention_chunk_size", "is missing, and layer_types asks for chunks")
    return [size if cut else None for cut in chunked]


def _sparse_layers(fields: Fields) -> frozenset[int]:
    """Return the layers with experts: those in `moe_layers`, or every `interleave_moe_layer_step`-th layer."""
    if fields.present("moe_layers"):
        return frozenset(fields.list_of_integers("moe_layers"))
    step = fields.integer("interleave_moe_layer_step", 1, 2**31, 1)
    return frozenset(range(step - 1, layer_count(fields), step))

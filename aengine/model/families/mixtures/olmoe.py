"""OLMoE: experts in all layers; queries and keys normed over all heads at once."""

from __future__ import annotations

from aengine.errors import UnsupportedModelError
from aengine.model.families.experts import expert_count, expert_width, softmax_router
from aengine.model.families.parts import attention, layers_of
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    if fields.present("clip_qkv"):
        raise UnsupportedModelError(f"{fields.source}: clip_qkv is set; clipped queries and keys are not supported")
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, kv_heads_default=True, qk_norm="all", qkv_bias=bias, out_bias=bias)
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=softmax_router(fields),
    )
    return layers_of(fields, heads, experts)

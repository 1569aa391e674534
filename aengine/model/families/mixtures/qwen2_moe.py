"""Qwen1.5 and Qwen2 with experts: beside those that are chosen, one that every token passes, behind a gate."""

from __future__ import annotations

from aengine.model.families.experts import expert_count, expert_width, softmax_router, sparse_layers
from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.families.windows import windows_by_layer
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec, MLPSpec


def layers(fields: Fields) -> list[LayerSpec]:
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields),
        router=softmax_router(fields),
        shared=MLPSpec(inner=expert_width(fields, "shared_expert_intermediate_size")),
        shared_gate=True,
    )
    dense, sparse = mlp(fields), sparse_layers(fields)
    heads = attention(fields, qkv_bias=fields.flag("qkv_bias", default=True))
    return layers_of(fields, heads, lambda i: experts if sparse[i] else dense, windows_by_layer(fields))

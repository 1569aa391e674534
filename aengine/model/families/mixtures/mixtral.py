"""Mixtral: experts in all layers, their weights divided by their sum."""

from __future__ import annotations

from aengine.model.families.experts import expert_count, expert_width, softmax_router
from aengine.model.families.parts import attention, layers_of
from aengine.model.families.plain.mistral import window_in_all_layers
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=softmax_router(fields, renormalise=True),
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return layers_of(fields, attention(fields), experts, window_in_all_layers(fields))

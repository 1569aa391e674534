"""Qwen3.5 with experts in all layers, and a shared one behind a gate."""

from __future__ import annotations

from aengine.model.families.experts import expert_count, expert_width, softmax_router
from aengine.model.families.hybrids.parts import hybrid_layers
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec, MLPSpec


def layers(fields: Fields) -> list[LayerSpec]:
    return hybrid_layers(fields, experts(fields, renormalise=True))


def experts(fields: Fields, renormalise: bool) -> ExpertsSpec:
    return ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields),
        router=softmax_router(fields, renormalise),
        shared=MLPSpec(inner=expert_width(fields, "shared_expert_intermediate_size")),
        shared_gate=True,
    )

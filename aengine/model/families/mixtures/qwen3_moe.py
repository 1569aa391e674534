"""Qwen3 with experts: some layers, or all of them, have a mixture of experts instead of the MLP."""

from __future__ import annotations

from aengine.model.families.experts import expert_count, expert_width, softmax_router, sparse_layers
from aengine.model.families.parts import layers_of, mlp
from aengine.model.families.plain import qwen3
from aengine.model.families.windows import sliding_window
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    experts = ExpertsSpec(count=expert_count(fields), inner=expert_width(fields), router=softmax_router(fields))
    dense, sparse = mlp(fields), sparse_layers(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", default=False) else None
    return layers_of(fields, qwen3.heads(fields), lambda i: experts if sparse[i] else dense, [window] * len(sparse))

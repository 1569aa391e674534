"""Ministral 3: Mistral whose queries grow with their position."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.families.plain.mistral import window_in_all_layers
from aengine.model.fields import Fields
from aengine.model.rope import MAX_POSITIONS, QueryGrowth
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
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

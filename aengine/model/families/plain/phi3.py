"""Phi-3 and Phi-4: q, k and v in one tensor, gate and up in another; a part of each head rotated, far by longrope."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.families.plain.mistral import window_in_all_layers
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    heads = attention(fields, kv_heads_default=True, fused=True, partial=True)
    window = window_in_all_layers(fields) if fields.present("sliding_window") else None
    return layers_of(fields, heads, mlp(fields, fused=True), window)

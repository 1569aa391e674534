"""Qwen2 and 2.5: biases of queries, keys and values; a sliding window in some layers."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.families.windows import windows_by_layer
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    return layers_of(fields, attention(fields, qkv_bias=True), mlp(fields), windows_by_layer(fields))

"""Qwen3: queries and keys normed by head, head_dim 128 where config.json is silent."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.families.windows import windows_by_layer
from aengine.model.fields import Fields
from aengine.model.spec import AttentionSpec, LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    return layers_of(fields, heads(fields, head_dim=128), mlp(fields), windows_by_layer(fields))


def heads(fields: Fields, head_dim: int | None = None) -> AttentionSpec:
    """head_dim: where the file names none."""
    bias = fields.flag("attention_bias", default=False)
    return attention(fields, qk_norm="head", head_dim=head_dim, qkv_bias=bias, out_bias=bias)

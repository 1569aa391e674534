"""Seed-OSS: Llama with head_dim of its own and a bias in front of attention, but not behind it."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    heads = attention(
        fields,
        kv_heads_default=True,
        head_dim=128,
        qkv_bias=fields.flag("attention_bias", default=True),
        out_bias=fields.flag("attention_out_bias", default=False),
    )
    return layers_of(fields, heads, mlp(fields, bias=fields.flag("mlp_bias", default=False)))

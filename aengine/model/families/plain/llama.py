"""Llama 2 and 3: biases where config.json says so, no window."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.fields import Fields
from aengine.model.spec import LayerSpec


def layers(fields: Fields) -> list[LayerSpec]:
    bias = fields.flag("attention_bias", default=False)
    # Old files name no KV heads; then there are as many as heads.
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias)
    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    return layers_of(fields, heads, ffn)

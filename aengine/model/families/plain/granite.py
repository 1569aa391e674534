"""Granite: Llama whose embeddings, attention scores, residuals and logits are multiplied."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.fields import Fields
from aengine.model.spec import EndsSpec, LayerSpec

_MOST = 1e6  # of a multiplier


def layers(fields: Fields) -> list[LayerSpec]:
    bias = fields.flag("attention_bias", default=False)
    scale = fields.number("attention_multiplier", 0, _MOST, 1.0)
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, scale=scale)
    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    return layers_of(fields, heads, ffn, residual_scale=fields.number("residual_multiplier", 0, _MOST, 1.0))


def ends(fields: Fields) -> EndsSpec:
    return EndsSpec(
        embedding_scale=fields.number("embedding_multiplier", 0, _MOST, 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1 / _MOST, _MOST, 1.0),
    )

"""OLMo 2: norms behind attention and MLP instead of before them; queries and keys normed over all heads at once."""

from __future__ import annotations

from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.fields import Fields
from aengine.model.spec import AttentionSpec, LayerNorms, LayerSpec

NORMS = LayerNorms(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_ffn=None,
    after_ffn="post_feedforward_layernorm",
)


def layers(fields: Fields) -> list[LayerSpec]:
    return layers_of(fields, heads(fields), mlp(fields), norms=NORMS)


def heads(fields: Fields, rope: Fields | None = None, theta: float = 10_000.0) -> AttentionSpec:
    bias = fields.flag("attention_bias", default=False)
    return attention(fields, kv_heads_default=True, qk_norm="all", qkv_bias=bias, out_bias=bias, rope=rope, theta=theta)

"""Parts of layers as config.json describes them, the same in most families; bounds that no model exceeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.model.fields import Fields, shown
from aengine.model.rope import read_rope
from aengine.model.spec import FFN, Activation, AttentionSpec, LayerNorms, LayerSpec, MLPSpec

# Far above any real model, far below what would overflow a size.
MAX_WIDTH = 2**20
_MAX_LAYERS = 4096
# Names that mean x * sigmoid(x).
SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
BEFORE = LayerNorms()  # where most families have them
_MAX_HEADS = 2**14


def hidden_size(fields: Fields) -> int:
    return fields.integer("hidden_size", 1, MAX_WIDTH)


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, _MAX_LAYERS)


def attention(
    fields: Fields,
    *,
    kv_heads_default: bool = False,
    head_dim: int | None = None,
    qk_norm: Literal["none", "head", "all"] = "none",
    qkv_bias: bool = False,
    out_bias: bool = False,
    fused: bool = False,
    partial: bool = False,
    part: float = 1.0,
    theta: float = 10_000.0,
    rope: Fields | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """kv_heads_default: as many KV heads as heads where the file names none; head_dim: where it names none (None:
    hidden_size / heads). partial, part, theta, and `rope` as its section: as `read_rope` takes them; the others: as
    `AttentionSpec` has them."""
    heads = fields.integer("num_attention_heads", 1, _MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", 1, heads, heads if kv_heads_default else None)
    if heads % kv_heads:
        raise fields.fail("num_attention_heads", f"({heads}) is no multiple of num_key_value_heads ({kv_heads})")
    dim = fields.integer("head_dim", 2, MAX_WIDTH, head_dim or max(hidden_size(fields) // heads, 1))
    if dim % 2:
        raise fields.fail("head_dim", f"must be even to be rotated, is {dim}")
    if heads * dim > MAX_WIDTH:
        raise fields.fail("head_dim", f"times num_attention_heads is {heads * dim}, more than {MAX_WIDTH}")
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        fused=fused,
        rope=read_rope(fields, head_dim=dim, section=rope, partial=partial, part=part, theta=theta),
        scale=scale,
        softcap=softcap,
    )


def mlp(
    fields: Fields,
    bias: bool = False,
    fused: bool = False,
    activations: Mapping[str, Activation] = SILU,
    key: str = "hidden_act",
) -> MLPSpec:
    """activations: what the family may have, by the names that files have for it, and the usual one first."""
    activation = activations[known_activation(fields, activations, key)]
    return MLPSpec(
        inner=fields.integer("intermediate_size", 1, MAX_WIDTH), bias=bias, fused=fused, activation=activation
    )


def known_activation(fields: Fields, names: Mapping[str, Activation] = SILU, key: str = "hidden_act") -> str:
    """The name that the file has for its activation. Raises `UnsupportedModelError` unless it is one of `names`."""
    name = fields.text(key, next(iter(names)))
    if name not in names:
        raise UnsupportedModelError(
            f"{fields.source}: {key} {shown(name)} is not supported, only {' or '.join(sorted(set(names.values())))}"
        )
    return name


def layers_of(
    fields: Fields,
    heads: AttentionSpec | Callable[[int], AttentionSpec],
    ffn: FFN | Callable[[int], FFN],
    windows: Sequence[int | None] | None = None,
    norms: LayerNorms = BEFORE,
    residual_scale: float = 1.0,
) -> list[LayerSpec]:
    """heads, ffn: the same in all layers, or of each; windows: None: no layer has one."""
    return [
        LayerSpec(
            attention=replace(heads(i) if callable(heads) else heads, window=window),
            ffn=ffn(i) if callable(ffn) else ffn,
            norms=norms,
            residual_scale=residual_scale,
        )
        for i, window in enumerate(windows or [None] * layer_count(fields))
    ]

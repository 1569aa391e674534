"""Families with three gated delta nets for each layer of gated attention: Qwen3.5, 3.6 and 3.8, Qwen3-Next."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aengine.model.families.parts import (
    MAX_HEADS,
    MAX_WIDTH,
    attention,
    expert_count,
    expert_width,
    layer_count,
    layer_norms,
    mlp,
    plain_ends,
    recurrent_layers,
    softmax_router,
    sparse_layers,
)
from aengine.model.fields import Fields
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import FFN, ExpertsSpec, MLPSpec
from aengine.model.spec.layer import LayerSpec
from aengine.model.spec.recurrent import DeltaSpec

_OFFSET = 1.0  # norm weights are stored as their difference from 1
_CONV = 4  # the width of all published convolutions, and the only one that kernels/delta/convolve.py computes


def qwen3_5(fields: Fields) -> list[LayerSpec]:
    return _layers(fields, mlp(fields))


def qwen3_5_moe(fields: Fields) -> list[LayerSpec]:
    """Experts in all layers."""
    return _layers(fields, _experts(fields, renormalise=True))


def qwen3_next(fields: Fields) -> list[LayerSpec]:
    """Experts in some layers or in all. q, k, v and z are stored in one matrix, ordered by key head."""
    sparse = sparse_layers(fields)
    experts = _experts(fields, renormalise=fields.flag("norm_topk_prob", default=True))
    dense = None if all(sparse) else mlp(fields)
    return _layers(fields, lambda i: experts if dense is None or sparse[i] else dense, interleaved=True)


def ends(fields: Fields) -> EndsSpec:
    return plain_ends(fields, norm_offset=_OFFSET)


def _layers(fields: Fields, ffn: FFN | Callable[[int], FFN], interleaved: bool = False) -> list[LayerSpec]:
    """ffn: the same in all layers, or a function of the layer. interleaved: see `DeltaSpec`."""
    bias = fields.flag("attention_bias", default=False)
    full = attention(
        fields,
        qk_norm="head",
        qk_norm_offset=_OFFSET,
        head_dim=256,
        qkv_bias=bias,
        out_bias=bias,
        partial=True,
        part=0.25,
    )
    full, linear = replace(full, gate=True), _delta(fields, interleaved)
    norms = layer_norms(fields, offset=_OFFSET)
    return [
        LayerSpec(attention=linear if is_linear else full, ffn=ffn(i) if callable(ffn) else ffn, norms=norms)
        for i, is_linear in enumerate(_linear_layers(fields))
    ]


def _experts(fields: Fields, renormalise: bool) -> ExpertsSpec:
    """Return experts with a shared one, which a gate weights."""
    return ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields),
        router=softmax_router(fields, renormalise),
        shared=MLPSpec(inner=expert_width(fields, "shared_expert_intermediate_size")),
        shared_gate=True,
    )


def _delta(fields: Fields, interleaved: bool) -> DeltaSpec:
    spec = DeltaSpec(
        key_heads=fields.integer("linear_num_key_heads", 1, MAX_HEADS),
        value_heads=fields.integer("linear_num_value_heads", 1, MAX_HEADS),
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_WIDTH),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_WIDTH),
        conv=fields.integer("linear_conv_kernel_dim", _CONV, _CONV, _CONV),
        interleaved=interleaved,
    )
    if spec.value_heads % spec.key_heads:
        raise fields.fail(
            "linear_num_value_heads", f"({spec.value_heads}) is no multiple of linear_num_key_heads ({spec.key_heads})"
        )
    if spec.heads.channels > MAX_WIDTH:
        raise fields.fail("linear_num_value_heads", f"makes {spec.heads.channels} channels, more than {MAX_WIDTH}")
    return spec


def _linear_layers(fields: Fields) -> list[bool]:
    """Return which layers have linear attention: as `layer_types` says, or all except one in each interval."""
    layers = layer_count(fields)
    if not fields.present("layer_types"):
        interval = fields.integer("full_attention_interval", 1, 2**31, 4)
        if interval > layers:
            raise fields.fail("full_attention_interval", f"({interval}) leaves none of {layers} layers full attention")
        return [(i + 1) % interval != 0 for i in range(layers)]
    return recurrent_layers(fields, "linear_attention")

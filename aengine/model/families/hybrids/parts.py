"""Layers of linear and of full attention in turn, as config.json describes them."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.delta.base import BLOCK
from aengine.model.families.parts import MAX_WIDTH, attention, layer_count
from aengine.model.fields import Fields, shown
from aengine.model.spec import FFN, DeltaSpec, EndsSpec, LayerSpec

_ROTATED = 0.25  # of each head, where the file is silent
_HEAD_DIM = 256  # the same
_MAX_HEADS = 2**14


def hybrid_layers(fields: Fields, ffn: FFN | Callable[[int], FFN], interleaved: bool = False) -> list[LayerSpec]:
    """ffn: the same in all layers, or of each; interleaved: as `DeltaSpec`."""
    bias = fields.flag("attention_bias", default=False)
    full = attention(
        fields, qk_norm="head", head_dim=_HEAD_DIM, qkv_bias=bias, out_bias=bias, partial=True, part=_ROTATED
    )
    full, linear = replace(full, gate=True), delta(fields, interleaved)
    return [
        LayerSpec(attention=linear if is_linear else full, ffn=ffn(i) if callable(ffn) else ffn)
        for i, is_linear in enumerate(linear_layers(fields))
    ]


def ends(fields: Fields) -> EndsSpec:
    """Norm weights are stored without the 1 that they are near to."""
    return EndsSpec(norm_offset=1.0)


def delta(fields: Fields, interleaved: bool) -> DeltaSpec:
    spec = DeltaSpec(
        key_heads=fields.integer("linear_num_key_heads", 1, _MAX_HEADS),
        value_heads=fields.integer("linear_num_value_heads", 1, _MAX_HEADS),
        key_dim=fields.integer("linear_key_head_dim", 1, MAX_WIDTH),
        value_dim=fields.integer("linear_value_head_dim", 1, MAX_WIDTH),
        conv=fields.integer("linear_conv_kernel_dim", 1, BLOCK, 4),
        interleaved=interleaved,
    )
    if spec.value_heads % spec.key_heads:
        raise fields.fail(
            "linear_num_value_heads", f"({spec.value_heads}) is no multiple of linear_num_key_heads ({spec.key_heads})"
        )
    if spec.heads.channels > MAX_WIDTH:
        raise fields.fail("linear_num_value_heads", f"makes {spec.heads.channels} channels, more than {MAX_WIDTH}")
    return spec


def linear_layers(fields: Fields) -> list[bool]:
    """Which layers have linear attention: those named so, or all but every so many."""
    layers = layer_count(fields)
    if not fields.present("layer_types"):
        interval = fields.integer("full_attention_interval", 1, 2**31, 4)
        if interval > layers:
            raise fields.fail("full_attention_interval", f"({interval}) leaves none of {layers} layers full attention")
        return [(i + 1) % interval != 0 for i in range(layers)]
    types = fields.strings("layer_types")
    for kind in types:
        if kind not in ("full_attention", "linear_attention"):
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(kind)} is not supported")
    if len(types) != layers:
        raise fields.fail("layer_types", f"names {len(types)} layers of {layers}")
    if "full_attention" not in types:
        raise UnsupportedModelError(f"{fields.source}: layer_types without full_attention are not supported")
    return [kind == "linear_attention" for kind in types]

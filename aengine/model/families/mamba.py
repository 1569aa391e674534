"""Families with Mamba2 layers: Granite 4."""

from __future__ import annotations

import math

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.recurrent.state import BLOCK
from aengine.model.families.parts import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_WIDTH,
    attention,
    hidden_size,
    known_activation,
    layer_count,
    layer_norms,
)
from aengine.model.families.plain import MAX_MULTIPLIER
from aengine.model.fields import Fields, shown
from aengine.model.recurrent_spec import MambaSpec
from aengine.model.spec import FFN, ExpertsSpec, LayerSpec, MLPSpec

# The names of layers in older and newer files, for whether a layer is recurrent.
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def granite(fields: Fields) -> list[LayerSpec]:
    """Granite 4: Granite's factors, Mamba2 in most layers or in none, and in some models experts and a shared one."""
    scale = fields.number("attention_multiplier", 0, MAX_MULTIPLIER, 1.0)
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, kv_heads_default=True, qkv_bias=bias, out_bias=bias, scale=scale)
    if fields.text("position_embedding_type", "nope") != "rope":
        heads = replace(heads, rope=None)
    recurrent = _recurrent_layers(fields)
    mamba = _granite_mamba(fields) if any(recurrent) else None
    ffn, norms = _granite_ffn(fields), layer_norms(fields)
    residual = fields.number("residual_multiplier", 0, MAX_MULTIPLIER, 1.0)
    return [
        LayerSpec(
            attention=mamba if mamba is not None and is_recurrent else heads,
            ffn=ffn,
            norms=norms,
            residual_scale=residual,
        )
        for is_recurrent in recurrent
    ]


def _granite_mamba(fields: Fields) -> MambaSpec:
    bias = fields.flag("mamba_proj_bias", default=False)
    inner = fields.integer("mamba_expand", 1, MAX_WIDTH, 2) * hidden_size(fields)
    return replace(_mamba(fields, inner), in_bias=bias, out_bias=bias)


def _granite_ffn(fields: Fields) -> FFN:
    shared = MLPSpec(
        inner=fields.integer("shared_intermediate_size", 1, MAX_WIDTH, 1024),
        fused=True,
        block="shared_mlp",
        fused_name="input_linear",
        down="output_linear",
    )
    count = fields.integer("num_local_experts", 0, MAX_EXPERTS, 8)
    if not count:
        return shared
    return ExpertsSpec(
        count=count,
        inner=fields.integer("intermediate_size", 1, MAX_WIDTH),
        router=Router(
            top_k=fields.integer("num_experts_per_tok", 1, count, min(2, count)), scoring="softmax_of_chosen"
        ),
        shared=shared,
        shared_name="shared_mlp",
        shared_beside=True,
        block="block_sparse_moe",
        router_name="router",
    )


def _recurrent_layers(fields: Fields) -> list[bool]:
    """Return which layers have Mamba2, as `layer_types` says."""
    key = "layer_types" if fields.present("layer_types") else "layers_block_type"
    kinds, count = fields.strings(key), layer_count(fields)
    for kind in kinds:
        if kind not in _KINDS:
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(kind)} is not supported")
    if len(kinds) != count:
        raise fields.fail(key, f"names {len(kinds)} layers of {count}")
    recurrent = [_KINDS[kind] for kind in kinds]
    if all(recurrent):
        raise UnsupportedModelError(f"{fields.source}: {key} without attention are not supported")
    return recurrent


def _mamba(fields: Fields, inner: int) -> MambaSpec:
    """Return Mamba2 whose projections have no biases. inner: the width of all heads together."""
    known_activation(fields)
    _refuse_limited_steps(fields)
    heads = fields.integer("mamba_n_heads", 1, MAX_HEADS, 128)
    groups = fields.integer("mamba_n_groups", 1, heads, 1)
    head_dim = fields.integer("mamba_d_head", 1, MAX_WIDTH) if fields.is_integer("mamba_d_head") else inner // heads
    if heads * head_dim != inner:
        raise fields.fail("mamba_n_heads", f"({heads}) times mamba_d_head ({head_dim}) is not {inner}")
    return _checked(
        fields,
        MambaSpec(
            groups=groups,
            heads=heads,
            state_dim=fields.integer("mamba_d_state", 1, MAX_WIDTH, 256),
            head_dim=head_dim,
            conv=fields.integer("mamba_d_conv", 1, BLOCK, 4),
            conv_bias=fields.flag("mamba_conv_bias", default=True),
        ),
    )


def _checked(fields: Fields, spec: MambaSpec) -> MambaSpec:
    """Return the specification if its sizes fit together."""
    if spec.heads % spec.groups:
        raise UnsupportedModelError(
            f"{fields.source}: {spec.heads} Mamba heads in {spec.groups} groups are not supported"
        )
    if (channels := spec.rank_heads().channels) > MAX_WIDTH:
        raise UnsupportedModelError(f"{fields.source}: Mamba layers have {channels} channels, more than {MAX_WIDTH}")
    return spec


def _refuse_limited_steps(fields: Fields) -> None:
    """Refuse limits of steps, which transformers applies to prompts only."""
    limits = dict(fields.items()).get("time_step_limit")
    if limits is None:
        return
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (limits, None)
    if isinstance(high, dict):  # newer files write {"__float__": "Infinity"}
        high = math.inf if high.get("__float__") == "Infinity" else high
    if low not in (0, None) or high not in (math.inf, None):
        raise UnsupportedModelError(f"{fields.source}: time_step_limit {shown(limits)} is not supported, only no limit")

"""Families with Mamba2 layers: Granite 4, Nemotron-H, Falcon-H1."""

from __future__ import annotations

import math

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.recurrent.state import BLOCK
from aengine.model.families.mixtures import sigmoid_experts
from aengine.model.families.parts import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_WIDTH,
    attention,
    hidden_size,
    known_activation,
    layer_count,
    layer_norms,
    mlp,
    norm_eps,
)
from aengine.model.families.plain import MAX_MULTIPLIER
from aengine.model.fields import Fields, shown
from aengine.model.spec.attention import AttentionSpec
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import FFN, Activation, ExpertsSpec, MLPSpec
from aengine.model.spec.layer import AttentionBesideMambaSpec, LayerNorms, LayerSpec, NormSpec
from aengine.model.spec.recurrent import MambaSpec

FALCON: dict[str, object] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8}
_FACTORS = -MAX_MULTIPLIER, MAX_MULTIPLIER
NEMOTRON: dict[str, object] = {"layer_norm_epsilon": 1e-5, "num_key_value_heads": 8}
_RELU2: dict[str, Activation] = {"relu2": "relu2"}
_NEMOTRON_ACT = "mlp_hidden_act"
_BEYOND_FLOAT32 = 2.0**128
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
    known_activation(fields)
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


def nemotron(fields: Fields) -> list[LayerSpec]:
    """Nemotron-H and Nemotron 3: a layer is Mamba2, attention without a rotation, an MLP, or experts."""
    norm = NormSpec("norm", fields.number("layer_norm_epsilon", 0, 1, 1e-5))
    before_attention, before_ffn = LayerNorms(norm, None, None, None), LayerNorms(None, None, norm, None)

    def layer(kind: str) -> LayerSpec:
        match kind:
            case "mamba":
                return LayerSpec(attention=_nemotron_mamba(fields), ffn=None, norms=before_attention)
            case "attention":
                return LayerSpec(attention=_nemotron_heads(fields), ffn=None, norms=before_attention)
            case "mlp":
                return LayerSpec(attention=None, ffn=_nemotron_mlp(fields), norms=before_ffn)
        return LayerSpec(attention=None, ffn=_nemotron_experts(fields), norms=before_ffn)

    kinds = _nemotron_kinds(fields)
    made = {kind: layer(kind) for kind in dict.fromkeys(kinds)}
    return [made[kind] for kind in kinds]


# The names of layers in older and newer files, and their letters in a pattern.
_NEMOTRON_KINDS = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "M": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}


def _nemotron_kinds(fields: Fields) -> list[str]:
    """Return the kind of each layer."""
    key = next(filter(fields.present, ("layers_block_type", "layer_types")), "hybrid_override_pattern")
    names = list(fields.text(key)) if key == "hybrid_override_pattern" else fields.strings(key)
    for name in names:
        if name not in _NEMOTRON_KINDS:
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(name)} is not supported")
    kinds = [_NEMOTRON_KINDS[name] for name in names]
    if "attention" not in kinds:
        raise UnsupportedModelError(f"{fields.source}: {key} without attention is not supported")
    return kinds


def _nemotron_mamba(fields: Fields) -> MambaSpec:
    known_activation(fields, key="mamba_hidden_act")
    _refuse_limited_steps(fields)
    bias = fields.flag("use_bias", default=False)
    heads = fields.integer("mamba_num_heads", 1, MAX_HEADS, 128)
    return _checked(
        fields,
        MambaSpec(
            groups=fields.integer("n_groups", 1, heads, 8),
            heads=heads,
            state_dim=fields.integer("ssm_state_size", 1, MAX_WIDTH, 128),
            head_dim=fields.integer("mamba_head_dim", 1, MAX_WIDTH, 64),
            conv=fields.integer("conv_kernel", 1, BLOCK, 4),
            conv_bias=fields.flag("use_conv_bias", default=True),
            in_bias=bias,
            out_bias=bias,
            block="mixer",
        ),
    )


def _nemotron_heads(fields: Fields) -> AttentionSpec:
    if fields.present("sliding_window"):
        raise UnsupportedModelError(f"{fields.source}: sliding_window is set; windows are not supported here")
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, head_dim=128, qkv_bias=bias, out_bias=bias)
    return replace(heads, rope=None, block="mixer")


def _nemotron_mlp(fields: Fields) -> MLPSpec:
    spec = mlp(fields, bias=fields.flag("mlp_bias", default=False), activations=_RELU2, key=_NEMOTRON_ACT)
    return replace(spec, gated=False, block="mixer")


def _nemotron_experts(fields: Fields) -> ExpertsSpec:
    known_activation(fields, _RELU2, _NEMOTRON_ACT)
    bias = fields.flag("mlp_bias", default=False)
    latent = fields.integer("moe_latent_size", 1, MAX_WIDTH) if fields.present("moe_latent_size") else 0
    if bias and latent:
        raise UnsupportedModelError(f"{fields.source}: mlp_bias with moe_latent_size is not supported")
    shared = MLPSpec(
        inner=fields.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH, 7688),
        bias=bias,
        activation="relu2",
        gated=False,
    )
    experts = sigmoid_experts(fields.with_defaults({"n_routed_experts": 8, "num_experts_per_tok": 2}))
    return replace(experts, shared=shared, activation="relu2", gated=False, latent=latent, block="mixer")


def falcon(fields: Fields) -> list[LayerSpec]:
    """Falcon-H1: attention and Mamba2 in every layer, beside each other, and factors of nearly everything."""
    gate, down = fields.numbers("mlp_multipliers", 2, *_FACTORS) if fields.present("mlp_multipliers") else (1.0, 1.0)
    bias = fields.flag("mlp_bias", default=False)
    ffn = replace(mlp(fields, bias=bias), block="feed_forward", gate_scale=gate)
    attention_in = fields.number("attention_in_multiplier", *_FACTORS, 1.0)
    attention_bias = fields.flag("attention_bias", default=False)
    if attention_bias and attention_in != 1.0:
        raise UnsupportedModelError(f"{fields.source}: attention_bias with attention_in_multiplier is not supported")
    heads = attention(fields, kv_heads_default=True, qkv_bias=attention_bias, out_bias=attention_bias)
    # A factor of all inputs is one of queries, of keys and of values.
    scale = heads.head_dim**-0.5 * attention_in**2 * fields.number("key_multiplier", *_FACTORS, 1.0)
    mixers = AttentionBesideMambaSpec(
        attention=replace(heads, scale=scale),
        mamba=_falcon_mamba(fields),
        attention_scale=attention_in * fields.number("attention_out_multiplier", *_FACTORS, 1.0),
        mamba_scale=fields.number("ssm_out_multiplier", *_FACTORS, 1.0),
    )
    norms = layer_norms(fields, before_ffn="pre_ff_layernorm")
    layer = LayerSpec(attention=mixers, ffn=ffn, norms=norms, residual_scale=down)
    return [layer] * layer_count(fields)


def falcon_ends(fields: Fields) -> EndsSpec:
    return EndsSpec(
        norm=NormSpec("model.final_layernorm", norm_eps(fields)),
        embedding_scale=fields.number("embedding_multiplier", *_FACTORS, 1.0),
        logit_scale=fields.number("lm_head_multiplier", *_FACTORS, 1.0),
    )


def _falcon_mamba(fields: Fields) -> MambaSpec:
    inner = fields.integer("mamba_expand", 1, MAX_WIDTH, 2) * hidden_size(fields)
    if fields.present("mamba_d_ssm") or not fields.has_key("mamba_d_ssm"):
        inner = fields.integer("mamba_d_ssm", 1, MAX_WIDTH, 1024)
    bias, norm = fields.flag("mamba_proj_bias", default=False), fields.flag("mamba_rms_norm", default=False)
    if norm and fields.flag("mamba_norm_before_gate", default=True):
        raise UnsupportedModelError(f"{fields.source}: mamba_norm_before_gate with mamba_rms_norm is not supported")
    inputs = fields.number("ssm_in_multiplier", *_FACTORS, 1.0)
    if bias and inputs != 1.0:
        raise UnsupportedModelError(f"{fields.source}: mamba_proj_bias with ssm_in_multiplier is not supported")
    factors = fields.numbers("ssm_multipliers", 5, *_FACTORS) if fields.present("ssm_multipliers") else (1.0,) * 5
    return replace(
        _mamba(fields, inner),
        in_bias=bias,
        out_bias=fields.flag("projectors_bias", default=False),
        norm=norm,
        factors=tuple(inputs * factor for factor in factors),
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
    # JSON has no infinity: some files write a number that no float32 reaches.
    unlimited = high is None or (isinstance(high, float) and high >= _BEYOND_FLOAT32)
    if low not in (0, None) or not unlimited:
        raise UnsupportedModelError(f"{fields.source}: time_step_limit {shown(limits)} is not supported, only no limit")

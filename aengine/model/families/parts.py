"""Reads the settings that most families have from config.json, and checks their bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.model.fields import Fields, shown
from aengine.model.rope import read_rope
from aengine.model.spec.attention import AttentionSpec, QKNorm
from aengine.model.spec.ends import EndsSpec
from aengine.model.spec.feed_forward import FFN, Activation, MLPSpec
from aengine.model.spec.layer import LayerNorms, LayerSpec, NormSpec

# Larger than any real model needs, and small enough that no product of sizes overflows.
MAX_WIDTH = 2**20
MAX_HEADS = 2**14
_MAX_LAYERS = 4096
MAX_EXPERTS = 512  # of the router's kernel
SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}  # names of x * sigmoid(x)
_EPS = 1e-6  # of norms, if the file does not give it
_EPS_KEYS = ("layernorm_epsilon", "layer_norm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")


def hidden_size(fields: Fields) -> int:
    return fields.integer("hidden_size", 1, MAX_WIDTH)


def layer_count(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", 1, _MAX_LAYERS)


def norm_eps(fields: Fields) -> float:
    """Return the eps of norms. Families have different keys for it."""
    return fields.number(next(filter(fields.present, _EPS_KEYS), "rms_norm_eps"), 0, 1, _EPS)


def layer_norms(
    fields: Fields,
    *,
    before_attention: str | None = "input_layernorm",
    after_attention: str | None = None,
    before_ffn: str | None = "post_attention_layernorm",
    after_ffn: str | None = None,
    offset: float = 0.0,
    centred: bool = False,
    bias: bool = False,
) -> LayerNorms:
    """Return the norms of a layer by their names in checkpoints. None: there is no such norm.

    offset: is added to the weights of all four. centred, bias: as in `NormSpec`.
    """
    eps = norm_eps(fields)
    names = (before_attention, after_attention, before_ffn, after_ffn)
    return LayerNorms(*(None if name is None else NormSpec(name, eps, offset, centred, bias) for name in names))


def plain_ends(fields: Fields, norm_offset: float = 0.0) -> EndsSpec:
    """Return the `EndsSpec` of most families: only a norm after the last layer.

    norm_offset: is added to the weight of this norm.
    """
    return EndsSpec(norm=NormSpec("model.norm", norm_eps(fields), norm_offset))


def attention(
    fields: Fields,
    *,
    kv_heads_default: bool = False,
    head_dim: int | None = None,
    qk_norm: QKNorm = "none",
    qk_norm_offset: float = 0.0,
    qkv_bias: bool = False,
    out_bias: bool = False,
    fused: bool = False,
    partial: bool = False,
    part: float = 1.0,
    theta: float = 10_000.0,
    rope: Fields | None = None,
    interleaved: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    """Return attention over keys and values. `AttentionSpec` explains the arguments that are not listed here.

    Args:
        kv_heads_default: Whether a file may leave out the number of KV heads. It then equals the number of heads.
        head_dim: Used if the file does not give it. None: hidden_size / heads.
        rope, partial, part, theta: Arguments of `read_rope`; `rope` is its `section`.
    """
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
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
        qk_norm_offset=qk_norm_offset,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        fused=fused,
        rope=read_rope(fields, head_dim=dim, section=rope, partial=partial, part=part, theta=theta),
        interleaved=interleaved,
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
    """activations: the family's activations by their names in files. The first one is the default."""
    activation = activations[known_activation(fields, activations, key)]
    return MLPSpec(
        inner=fields.integer("intermediate_size", 1, MAX_WIDTH), bias=bias, fused=fused, activation=activation
    )


def known_activation(fields: Fields, names: Mapping[str, Activation] = SILU, key: str = "hidden_act") -> str:
    """Return the activation's name in the file. Raises `UnsupportedModelError` if it is not one of `names`."""
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
    norms: LayerNorms | None = None,
    residual_scale: float = 1.0,
) -> list[LayerSpec]:
    """Return all layers.

    Args:
        heads, ffn: The same in all layers, or functions of the layer.
        windows: The window of each layer. None: no layer has one.
        norms: None: one norm before attention and one before the feed-forward part.
    """
    norms = norms or layer_norms(fields)
    return [
        LayerSpec(
            attention=replace(heads(i) if callable(heads) else heads, window=window),
            ffn=ffn(i) if callable(ffn) else ffn,
            norms=norms,
            residual_scale=residual_scale,
        )
        for i, window in enumerate(windows or [None] * layer_count(fields))
    ]


# ---- mixtures of experts


def expert_count(fields: Fields) -> int:
    """Read the number of experts: num_local_experts (transformers 5) or num_experts (older versions)."""
    known_activation(fields)
    key = "num_local_experts" if fields.present("num_local_experts") else "num_experts"
    return fields.integer(key, 1, MAX_EXPERTS)


def expert_width(fields: Fields, key: str = "moe_intermediate_size") -> int:
    return fields.integer(key, 1, MAX_WIDTH)


def softmax_router(fields: Fields, renormalise: bool | None = None) -> Router:
    """Return a router that computes a softmax over all experts and then chooses the best experts.

    renormalise: whether the weights of the chosen experts are divided by their sum. None: norm_topk_prob of the file.
    """
    if renormalise is None:
        renormalise = fields.flag("norm_topk_prob", default=False)
    top_k = fields.integer("num_experts_per_tok", 1, expert_count(fields))
    return Router(top_k=top_k, renormalise=renormalise)


def sparse_layers(fields: Fields) -> list[bool]:
    """Return which layers have experts: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1, 2**31, 1)
    dense = fields.list_of_integers("mlp_only_layers") if fields.present("mlp_only_layers") else []
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layer_count(fields))]


# ---- sliding windows


def windows_by_layer(fields: Fields) -> list[int | None]:
    """Return the window of each layer, by Qwen's settings.

    `use_sliding_window` enables windows. `layer_types` says which layers have one. Without it, all layers from
    `max_window_layers` on have one.
    """
    layers = layer_count(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", default=False) else None
    if fields.present("layer_types"):
        slides = layer_types(fields)
        if any(slides) and window is None:
            raise fields.fail("layer_types", "asks for sliding attention while no sliding_window is in use")
    elif window is not None:
        first = fields.integer("max_window_layers", 0, 2**31, 28)
        slides = [layer >= first for layer in range(layers)]
    else:
        slides = [False] * layers
    return [window if slide else None for slide in slides]


def sliding_window(fields: Fields) -> int | None:
    """Return the window. Null means that there is none; a file without the key means 4096."""
    if fields.has_key("sliding_window") and not fields.present("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, 2**31, 4096)


def layer_types(fields: Fields, kind: str = "sliding_attention") -> list[bool]:
    """Return which layers are of this kind, as `layer_types` says. The others have full attention."""
    types = fields.strings("layer_types")
    for one in types:
        if one not in ("full_attention", kind):
            raise UnsupportedModelError(f"{fields.source}: layer type {shown(one)} is not supported")
    if len(types) != (layers := layer_count(fields)):
        raise fields.fail("layer_types", f"names {len(types)} layers of {layers}")
    return [one == kind for one in types]


def recurrent_layers(fields: Fields, kind: str) -> list[bool]:
    """Like layer_types(), for a recurrent kind. At least one layer must have full attention."""
    recurrent = layer_types(fields, kind)
    if all(recurrent):
        raise UnsupportedModelError(f"{fields.source}: layer_types without full_attention are not supported")
    return recurrent


def slides_by_layer(fields: Fields, every: int) -> list[bool]:
    """Return which layers have a sliding window: as `layer_types` says, or all except every `every`-th layer."""
    if fields.present("layer_types"):
        return layer_types(fields)
    return [(layer + 1) % every != 0 for layer in range(layer_count(fields))]


def rope_sections(fields: Fields) -> tuple[Fields | None, Fields | None]:
    """Return the rotation's settings for layers with a window, and for layers without one.

    A `rope_scaling` applies only to the latter. None: the file only has its rope_theta.
    """
    plain = Fields({}, fields.source)
    section = fields.section("rope_parameters")
    if section is None or not (section.present("sliding_attention") or section.present("full_attention")):
        return plain, fields.section("rope_scaling") or section
    return section.section("sliding_attention") or plain, section.section("full_attention") or plain


def unused_projections(layers: Sequence[LayerSpec]) -> tuple[str, ...]:
    """Return prefixes of K and V projections in layers that read other layers' K and V. Some files have them."""
    shares = (
        i
        for i, one in enumerate(layers)
        if isinstance(one.attention, AttentionSpec) and one.attention.shares_kv_of is not None
    )
    return tuple(f"model.layers.{i}.self_attn.{name}." for i in shares for name in ("k_proj", "v_proj", "k_norm"))

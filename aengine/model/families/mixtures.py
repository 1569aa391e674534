"""Families with attention over keys and values, and a mixture of experts in some layers or in all."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.kernels.experts.rule import GateClamp
from aengine.model.families.parts import (
    MAX_EXPERTS,
    MAX_WIDTH,
    attention,
    expert_count,
    expert_width,
    hidden_size,
    known_activation,
    layer_count,
    layer_types,
    layers_of,
    mlp,
    sliding_window,
    softmax_router,
    sparse_layers,
    windows_by_layer,
)
from aengine.model.families.plain import ernie_heads, qwen3_heads, window_in_all_layers
from aengine.model.fields import Fields, shown
from aengine.model.spec.feed_forward import ExpertsSpec, MLPSpec
from aengine.model.spec.layer import LayerSpec

MIXTRAL: dict[str, object] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None}
DOTS1: dict[str, object] = {"use_sliding_window": True, "max_window_layers": 62, "norm_topk_prob": False}
HY3: dict[str, object] = {"rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0}
HY3_FIXED: dict[str, object] = {
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
}
MINIMAX_FIXED: dict[str, object] = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
GPT_OSS: dict[str, object] = {
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

_SMALLEST_SUM = 1e-6  # of the weights of chosen experts, which cannot be smaller


def mixtral(fields: Fields) -> list[LayerSpec]:
    """Mixtral: experts in all layers. The weights of the chosen experts are divided by their sum."""
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=softmax_router(fields, renormalise=True),
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return layers_of(fields, attention(fields), experts, window_in_all_layers(fields))


def qwen2_moe(fields: Fields) -> list[LayerSpec]:
    """Qwen1.5 and Qwen2 with experts. Every token passes one shared expert, which a gate weights."""
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields),
        router=softmax_router(fields),
        shared=MLPSpec(inner=expert_width(fields, "shared_expert_intermediate_size")),
        shared_gate=True,
    )
    dense, sparse = mlp(fields), sparse_layers(fields)
    heads = attention(fields, qkv_bias=fields.flag("qkv_bias", default=True))
    return layers_of(fields, heads, lambda i: experts if sparse[i] else dense, windows_by_layer(fields))


def qwen3_moe(fields: Fields) -> list[LayerSpec]:
    """Qwen3 with experts in some layers or in all."""
    experts = ExpertsSpec(count=expert_count(fields), inner=expert_width(fields), router=softmax_router(fields))
    dense, sparse = mlp(fields), sparse_layers(fields)
    window = sliding_window(fields) if fields.flag("use_sliding_window", default=False) else None
    return layers_of(fields, qwen3_heads(fields), lambda i: experts if sparse[i] else dense, [window] * len(sparse))


def qwen3_vl_moe(fields: Fields) -> list[LayerSpec]:
    """The language model of Qwen3-VL with experts. Weights of the chosen experts are divided by their sum.

    Published files have the experts' matrices transposed, files of transformers do not. The shapes say which.
    """
    inner, hidden = expert_width(fields), hidden_size(fields)
    if hidden in (inner, 2 * inner):
        raise UnsupportedModelError(
            f"{fields.source}: hidden_size {hidden} and moe_intermediate_size {inner} do not show whether the experts' "
            f"matrices are transposed"
        )
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=inner,
        router=softmax_router(fields, renormalise=True),
        may_be_transposed=True,
    )
    dense, sparse = mlp(fields), sparse_layers(fields)
    return layers_of(fields, qwen3_heads(fields), lambda i: experts if sparse[i] else dense)


def olmoe(fields: Fields) -> list[LayerSpec]:
    """OLMoE: experts in all layers; one norm over all query heads, one over all key heads."""
    if fields.present("clip_qkv"):
        raise UnsupportedModelError(f"{fields.source}: clip_qkv is set; clipped queries and keys are not supported")
    bias = fields.flag("attention_bias", default=False)
    heads = attention(fields, kv_heads_default=True, qk_norm="all", qkv_bias=bias, out_bias=bias)
    experts = ExpertsSpec(
        count=expert_count(fields), inner=expert_width(fields, "intermediate_size"), router=softmax_router(fields)
    )
    return layers_of(fields, heads, experts)


def glm4_moe(fields: Fields) -> list[LayerSpec]:
    """GLM-4.5 to 4.7: half of each head rotated; experts chosen by corrected sigmoids; the first layers dense."""
    heads = attention(
        fields,
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
        qkv_bias=fields.flag("attention_bias", default=False),
        partial=True,
        part=0.5,
    )
    dense, sparse = mlp(fields), sigmoid_experts(fields)
    first = fields.integer("first_k_dense_replace", 0, 2**31, 1)
    return layers_of(fields, heads, lambda i: dense if i < first else sparse)


def sigmoid_experts(fields: Fields) -> ExpertsSpec:
    """Experts as in DeepSeek-V3: chosen by sigmoids and a correction, from the best groups; one expert is shared."""
    key = "n_routed_experts" if fields.present("n_routed_experts") else "num_local_experts"
    count, inner = fields.integer(key, 1, MAX_EXPERTS), expert_width(fields)
    groups = fields.integer("n_group", 1, count, 1)
    router = Router(
        top_k=fields.integer("num_experts_per_tok", 1, count),
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", default=True),
        groups=groups,
        chosen_groups=fields.integer("topk_group", 1, groups, 1),
        scale=fields.number("routed_scaling_factor", 0, 1e6, 1.0),
    )
    try:
        router.check(count)
    except ValueError as error:
        raise fields.fail(key, f"and n_group, topk_group do not fit together: {error}") from None
    shared = fields.integer("n_shared_experts", 0, 64, 1)
    return ExpertsSpec(
        count=count,
        inner=inner,
        router=router,
        correction="gate.e_score_correction_bias",
        shared=MLPSpec(inner=shared * inner) if shared else None,
        shared_name="shared_experts",
    )


def ernie4_5_moe(fields: Fields) -> list[LayerSpec]:
    """ERNIE 4.5 with experts in all layers but the first ones: chosen by corrected softmaxes, some shared."""
    if fields.flag("use_bias", default=False):
        raise UnsupportedModelError(f"{fields.source}: use_bias is true; experts with biases are not supported here")
    if fields.number("moe_norm_min", 0, 1, 0.0) > _SMALLEST_SUM:
        raise UnsupportedModelError(f"{fields.source}: moe_norm_min above {_SMALLEST_SUM:g} is not supported")
    known_activation(fields)
    count, inner = fields.integer("moe_num_experts", 1, MAX_EXPERTS, 64), expert_width(fields)
    shared, layers = fields.integer("moe_num_shared_experts", 0, 64, 2), layer_count(fields)
    experts = ExpertsSpec(
        count=count,
        inner=inner,
        router=Router(top_k=fields.integer("moe_k", 1, count, min(6, count)), renormalise=True),
        correction="moe_statics.e_score_correction_bias",
        shared=MLPSpec(inner=shared * inner) if shared else None,
        shared_name="shared_experts",
    )
    first = fields.integer("moe_layer_start_index", 0, 2**31, 1)
    last = fields.integer("moe_layer_end_index", -1, 2**31, -1) % layers
    step = fields.integer("moe_layer_interval", 1, 2**31, 1)
    dense = mlp(fields)
    sparse = [first <= i <= last and (i + 1) % step == 0 for i in range(layers)]
    return layers_of(fields, ernie_heads(fields, bias=False), lambda i: experts if sparse[i] else dense)


def bailing_moe2(fields: Fields) -> list[LayerSpec]:
    """Ling and Ring 2.0: GLM-4.5 with one matrix for queries, keys and values, and other names."""
    if (scoring := fields.text("score_function", "sigmoid")) != "sigmoid":
        raise UnsupportedModelError(f"{fields.source}: score_function {shown(scoring)} is not supported, only sigmoid")
    if not fields.flag("moe_router_enable_expert_bias", default=True):
        raise UnsupportedModelError(f"{fields.source}: moe_router_enable_expert_bias false is not supported")
    heads = attention(
        fields,
        qk_norm="head" if fields.flag("use_qk_norm", default=True) else "none",
        qkv_bias=fields.flag("use_qkv_bias", default=False),
        out_bias=fields.flag("use_bias", default=False),
        fused=True,
        partial=True,
        part=_rotary_part(fields),
    )
    heads = replace(
        heads, block="attention", fused_name="query_key_value", out="dense", norms=("query_layernorm", "key_layernorm")
    )
    shared = fields.integer("num_shared_experts", 0, 64, 1)
    counts = {"n_routed_experts": expert_count(fields), "n_shared_experts": shared}
    inner = fields.integer("moe_shared_expert_intermediate_size", 1, MAX_WIDTH, expert_width(fields))
    sparse = replace(
        sigmoid_experts(fields.with_defaults(counts)),
        correction="gate.expert_bias",
        shared=MLPSpec(inner=shared * inner) if shared else None,
    )
    dense, first = mlp(fields), fields.integer("first_k_dense_replace", 0, 2**31, 0)
    return layers_of(fields, heads, lambda i: dense if i < first else sparse)


def dots1(fields: Fields) -> list[LayerSpec]:
    """dots.llm1: Qwen3's attention with DeepSeek-V3's experts; the first layers are dense."""
    dense, sparse = mlp(fields), sigmoid_experts(fields)
    first = fields.integer("first_k_dense_replace", 0, 2**31, 0)
    heads = qwen3_heads(fields)
    return layers_of(fields, heads, lambda i: dense if i < first else sparse, windows_by_layer(fields))


def minimax_m2(fields: Fields) -> list[LayerSpec]:
    """MiniMax M2 and M2.5: one norm over all query heads and one over all keys; half of each head is rotated."""
    heads = attention(fields, head_dim=128, qk_norm="all", partial=True, part=_rotary_part(fields), theta=5e6)
    experts = ExpertsSpec(
        count=expert_count(fields),
        inner=expert_width(fields, "intermediate_size"),
        router=_corrected_sigmoids(fields),
        correction="e_score_correction_bias",
        block="block_sparse_moe",
        gate="w1",
        up="w3",
        down="w2",
    )
    return layers_of(fields, heads, experts)


def _rotary_part(fields: Fields) -> float:
    """Return the rotated share of a head. Published files give it as a number of dimensions."""
    if not fields.present("rotary_dim"):
        return 1.0
    size = fields.integer("head_dim", 2, MAX_WIDTH, 128)
    return fields.integer("rotary_dim", 2, size) / size


def hy3(fields: Fields) -> list[LayerSpec]:
    """Hy3: Qwen3's attention; experts chosen by corrected sigmoids, and one that every token passes."""
    count, inner = expert_count(fields), expert_width(fields)
    shared = fields.integer("num_shared_experts", 0, 64, 1)
    sparse = ExpertsSpec(
        count=count,
        inner=inner,
        router=_corrected_sigmoids(fields, scale=fields.number("router_scaling_factor", 0, 1e6, 2.826)),
        correction="expert_bias",
        shared=MLPSpec(inner=shared * inner) if shared else None,
        router_name="router.gate",
        shared_name="shared_mlp",
    )
    dense = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    is_sparse = sparse_by_type(fields)
    heads = qwen3_heads(fields, head_dim=128)
    return layers_of(fields, heads, lambda i: sparse if is_sparse[i] else dense)


def _corrected_sigmoids(fields: Fields, scale: float = 1.0) -> Router:
    top_k = fields.integer("num_experts_per_tok", 1, expert_count(fields), 8)
    return Router(top_k=top_k, scoring="sigmoid", renormalise=True, scale=scale)


def sparse_by_type(fields: Fields) -> list[bool]:
    """Return which layers have experts. If the file does not say, all except the first layer."""
    layers = layer_count(fields)
    if not fields.present("mlp_layer_types"):
        first = fields.integer("first_k_dense_replace", 0, 2**31, 1)
        return [layer >= first for layer in range(layers)]
    types = fields.strings("mlp_layer_types")
    if len(types) != layers or not {"dense", "sparse"}.issuperset(types):
        raise fields.fail("mlp_layer_types", f"must be dense or sparse for each of {layers} layers")
    return [kind == "sparse" for kind in types]


def gpt_oss(fields: Fields) -> list[LayerSpec]:
    """gpt-oss: a window in every other layer, a sink for each head, biases everywhere, experts with clamped gates."""
    bias = fields.flag("attention_bias", default=True)
    heads = attention(fields, head_dim=64, qkv_bias=bias, out_bias=bias, theta=150_000.0)
    top_k = "num_experts_per_tok" if fields.present("num_experts_per_tok") else "experts_per_token"
    count = expert_count(fields)
    experts = ExpertsSpec(
        count=count,
        inner=expert_width(fields, "intermediate_size"),
        router=Router(top_k=fields.integer(top_k, 1, count, min(4, count)), scoring="softmax_of_chosen"),
        clamp=GateClamp(
            alpha=fields.number("swiglu_alpha", 0, 1e3, 1.702), limit=fields.number("swiglu_limit", 1e-3, 1e6, 7.0)
        ),
        biases=True,
        transposed=True,
        alternating=True,
        router_name="router",
    )
    slides = (
        layer_types(fields)
        if fields.present("layer_types")
        else [layer % 2 == 0 for layer in range(layer_count(fields))]
    )
    window = sliding_window(fields)
    return layers_of(fields, replace(heads, sinks=True), experts, [window if slide else None for slide in slides])

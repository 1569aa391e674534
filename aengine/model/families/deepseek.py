"""Families with attention over latents: DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash. Their first layers are dense."""

from __future__ import annotations

from msgspec.structs import replace

from aengine.errors import UnsupportedModelError
from aengine.kernels.experts.routing.router import Router
from aengine.model.families.mixtures import sigmoid_experts
from aengine.model.families.parts import MAX_HEADS, MAX_WIDTH, layer_count, layer_norms, mlp
from aengine.model.fields import Fields, shown
from aengine.model.rope import read_rope, yarn_score_factor
from aengine.model.spec.attention import LatentSpec
from aengine.model.spec.feed_forward import ExpertsSpec
from aengine.model.spec.layer import LayerSpec

V3: dict[str, object] = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2: dict[str, object] = {
    **{key: V3[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    "first_k_dense_replace": 0,
    "n_shared_experts": 2,
}
FLASH: dict[str, object] = {
    "routed_scaling_factor": 1.8,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
}


def v3(fields: Fields) -> list[LayerSpec]:
    return _layers(fields, sigmoid_experts(fields), _first_dense(fields))


def v2(fields: Fields) -> list[LayerSpec]:
    return _layers(fields, _softmax_experts(fields), _first_dense(fields))


def glm_flash(fields: Fields) -> list[LayerSpec]:
    count = layer_count(fields)
    dense = [True, *[False] * (count - 1)]
    if fields.present("mlp_layer_types"):
        types = fields.strings("mlp_layer_types")
        if len(types) != count or not {*types} <= {"dense", "sparse"}:
            raise fields.fail("mlp_layer_types", f"must name {count} layers dense or sparse, is {shown(types)}")
        dense = [kind == "dense" for kind in types]
    return _layers(fields, sigmoid_experts(fields), dense)


def _layers(fields: Fields, experts: ExpertsSpec, dense: list[bool]) -> list[LayerSpec]:
    attention = _attention(fields)
    ffn = mlp(fields, bias=fields.flag("mlp_bias", default=False))
    norms = layer_norms(fields)
    return [LayerSpec(attention=attention, ffn=ffn if is_dense else experts, norms=norms) for is_dense in dense]


def _first_dense(fields: Fields) -> list[bool]:
    first = fields.integer("first_k_dense_replace", 0, 2**31)
    return [layer < first for layer in range(layer_count(fields))]


def _attention(fields: Fields) -> LatentSpec:
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    unrotated = fields.integer("qk_nope_head_dim", 1, MAX_WIDTH)
    rotated = fields.integer("qk_rope_head_dim", 2, MAX_WIDTH)
    value_dim = fields.integer("v_head_dim", 1, MAX_WIDTH)
    if rotated % 2:
        raise fields.fail("qk_rope_head_dim", f"must be even to be rotated, is {rotated}")
    if heads * (unrotated + rotated + value_dim) > MAX_WIDTH:
        raise fields.fail("num_attention_heads", f"({heads}) makes heads of more than {MAX_WIDTH} columns")
    return LatentSpec(
        heads=heads,
        unrotated=unrotated,
        rotated=rotated,
        value_dim=value_dim,
        rank=fields.integer("kv_lora_rank", 1, MAX_WIDTH),
        query_rank=fields.integer("q_lora_rank", 1, MAX_WIDTH) if fields.present("q_lora_rank") else 0,
        bias=fields.flag("attention_bias", default=False),
        rope=read_rope(fields, head_dim=rotated),
        interleaved=fields.flag("rope_interleave", default=True),
        scale=(unrotated + rotated) ** -0.5 * yarn_score_factor(fields) ** 2,
    )


def _softmax_experts(fields: Fields) -> ExpertsSpec:
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(f"{fields.source}: topk_method {shown(method)} is not supported")
    groups = fields if method == "group_limited_greedy" else fields.without("n_group").without("topk_group")
    experts = sigmoid_experts(groups)
    plain = experts.router
    router = Router(
        top_k=plain.top_k,
        groups=plain.groups,
        chosen_groups=plain.chosen_groups,
        group_score="max",
        scale=plain.scale,
    )
    return replace(experts, router=router, correction=False)

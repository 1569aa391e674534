"""GLM-4.5 to 4.7: half of each head rotated; experts by corrected sigmoids and a shared one; first layers dense."""

from __future__ import annotations

from aengine.kernels.experts.routing.router import Router
from aengine.model.families.experts import MAX_EXPERTS, expert_width
from aengine.model.families.parts import attention, layers_of, mlp
from aengine.model.fields import Fields
from aengine.model.spec import ExpertsSpec, LayerSpec, MLPSpec


def layers(fields: Fields) -> list[LayerSpec]:
    heads = attention(
        fields,
        qk_norm="head" if fields.flag("use_qk_norm", default=False) else "none",
        qkv_bias=fields.flag("attention_bias", default=False),
        partial=True,
        part=0.5,
    )
    dense, sparse = mlp(fields), experts(fields)
    first = fields.integer("first_k_dense_replace", 0, 2**31, 1)
    return layers_of(fields, heads, lambda i: dense if i < first else sparse)


def experts(fields: Fields) -> ExpertsSpec:
    """Chosen by sigmoids and a correction, from the best groups, as DeepSeek-V3 does."""
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
        correction=True,
        shared=MLPSpec(inner=shared * inner) if shared else None,
        shared_name="shared_experts",
    )

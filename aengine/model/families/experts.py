"""Mixtures of experts as config.json describes them."""

from __future__ import annotations

from aengine.kernels.experts.routing.router import Router
from aengine.model.families.parts import MAX_WIDTH, known_activation, layer_count
from aengine.model.fields import Fields

MAX_EXPERTS = 512  # what the router's kernel takes


def expert_count(fields: Fields) -> int:
    """Spelled num_local_experts by transformers 5, num_experts before."""
    known_activation(fields)
    key = "num_local_experts" if fields.present("num_local_experts") else "num_experts"
    return fields.integer(key, 1, MAX_EXPERTS)


def expert_width(fields: Fields, key: str = "moe_intermediate_size") -> int:
    return fields.integer(key, 1, MAX_WIDTH)


def softmax_router(fields: Fields, renormalise: bool | None = None) -> Router:
    """Softmax over all experts, then the best; renormalise: None: as `norm_topk_prob` says."""
    if renormalise is None:
        renormalise = fields.flag("norm_topk_prob", default=False)
    top_k = fields.integer("num_experts_per_tok", 1, expert_count(fields))
    return Router(top_k=top_k, renormalise=renormalise)


def sparse_layers(fields: Fields) -> list[bool]:
    """Which layers have experts, as Qwen's files say it: every so many, without those that are named."""
    step = fields.integer("decoder_sparse_step", 1, 2**31, 1)
    dense = fields.list_of_integers("mlp_only_layers") if fields.present("mlp_only_layers") else []
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layer_count(fields))]

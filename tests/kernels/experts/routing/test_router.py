"""The routing rule against the routers of transformers, family by family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aengine.kernels.experts.routing.router import Router, route_reference

pytest.importorskip("transformers")

import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

TOKENS, HIDDEN, EXPERTS, TOP_K = 9, 32, 16, 4
GROUPED: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}


def router_of(module: Callable[[Any], torch.nn.Module], config: Any) -> torch.nn.Module:
    router = module(config).eval()
    for tensor in (*router.parameters(), *router.buffers()):
        torch.nn.init.normal_(tensor, std=0.3)
    return router


def config(family: str, **settings: Any) -> Any:
    return transformers.AutoConfig.for_model(
        family, hidden_size=HIDDEN, num_experts_per_tok=TOP_K, num_local_experts=EXPERTS, **settings
    )


CASES = {
    "qwen3": (
        Qwen3MoeTopKRouter,
        config("qwen3_moe", num_experts=EXPERTS, norm_topk_prob=True),
        Router(4, "softmax", True),
    ),
    "qwen2": (Qwen2MoeTopKRouter, config("qwen2_moe", num_experts=EXPERTS, norm_topk_prob=False), Router(4)),
    "olmoe": (OlmoeTopKRouter, config("olmoe", num_experts=EXPERTS, norm_topk_prob=False), Router(4)),
    "mixtral": (MixtralTopKRouter, config("mixtral"), Router(4, "softmax", True)),
    "deepseek-v3": (
        DeepseekV3TopkRouter,
        config("deepseek_v3", n_routed_experts=EXPERTS, **GROUPED),
        Router(4, "sigmoid", True, 4, 2, "top2", 2.5),
    ),
    "glm4": (
        Glm4MoeTopkRouter,
        config("glm4_moe", n_routed_experts=EXPERTS, **{**GROUPED, "n_group": 1, "topk_group": 1}),
        Router(4, "sigmoid", True, scale=2.5),
    ),
    "gpt-oss": (GptOssTopKRouter, config("gpt_oss"), Router(4, "softmax_of_chosen")),
    "phi-moe": (PhimoeTopKRouter, config("phimoe", router_jitter_noise=0.3), Router(2, "sparsemixer", jitter=0.3)),
}


@pytest.mark.parametrize("family", CASES)
def test_experts_and_weights_are_those_of_transformers(family: str) -> None:
    module, settings, rule = CASES[family]
    router = router_of(module, settings)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        _, expected_weights, expected_ids = router(x)
        logits = torch.nn.functional.linear(x, router.weight, getattr(router, "bias", None))
        ids, weights = route_reference(logits, rule, getattr(router, "e_score_correction_bias", None))
    assert ids.dtype == torch.int32
    # transformers does not define the order of some.
    order, expected_order = ids.argsort(dim=1), expected_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order).long(), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(weights.gather(1, order), expected_weights.gather(1, expected_order).float())


def test_logits_decide_where_sigmoids_are_equal() -> None:
    """Llama 4's router returns the sigmoids of all experts, which are 0 for those that are not chosen."""
    router = Llama4Router(Llama4TextConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=1))
    router.weight.data.normal_(std=10.0)
    x = torch.randn(TOKENS, HIDDEN)
    with torch.no_grad():
        expected, logits = router(x)
        ids, weights = route_reference(logits, Router(1, "sigmoid_of_chosen"))
        by_sigmoid, _ = route_reference(logits, Router(1, "sigmoid"))
    assert torch.equal(torch.zeros_like(expected).scatter(1, ids.long(), weights), expected)
    assert not torch.equal(ids, by_sigmoid)


def test_the_best_expert_stands_for_its_group_where_it_is_asked_for() -> None:
    logits = torch.tensor([[9.0, 0.0, 8.0, 7.0]])
    of_groups = {
        score: route_reference(logits, Router(2, "softmax_of_chosen", groups=2, group_score=score))[0].tolist()  # type: ignore[arg-type]
        for score in ("max", "top2")
    }
    assert of_groups == {"max": [[0, 1]], "top2": [[2, 3]]}


def test_among_equals_the_lowest_id_wins() -> None:
    ids, weights = route_reference(torch.zeros(2, 8), Router(3))
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert weights.tolist() == [[0.125] * 3] * 2


@pytest.mark.parametrize(
    ("router", "what"),
    [
        (Router(9), "top_k is 9"),
        (Router(0), "top_k is 0"),
        (Router(2, groups=3), "groups of 8 experts"),
        (Router(2, groups=2, chosen_groups=3), "3 of 2 groups"),
        (Router(5, groups=2, chosen_groups=1), "have 4 experts"),
        (Router(1, groups=8), "no best two"),
    ],
)
def test_what_cannot_be_chosen_is_refused(router: Router, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        route_reference(torch.zeros(1, 8), router)


def test_sigmoids_of_nothing_have_weights_of_nothing() -> None:
    _, weights = route_reference(torch.full((1, 4), -200.0), Router(2, "sigmoid", True))
    assert weights.tolist() == [[0.0, 0.0]]

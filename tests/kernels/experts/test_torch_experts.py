"""The reference of experts against transformers, and against itself in float64."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.experts.torch_experts import TorchExperts

pytest.importorskip("transformers")

import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

TOKENS, EXPERTS, TOP_K, HIDDEN, INTER = 11, 6, 3, 32, 24


def layer() -> tuple[Qwen3MoeExperts, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=EXPERTS, moe_intermediate_size=INTER, num_experts_per_tok=TOP_K
    )
    experts = Qwen3MoeExperts(config)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ids = torch.rand(TOKENS, EXPERTS).argsort(dim=1)[:, :TOP_K].int()
    return experts, torch.randn(TOKENS, HIDDEN), ids, torch.rand(TOKENS, TOP_K), torch.randn(TOKENS, HIDDEN)


@torch.no_grad()
def test_the_weighted_sum_is_that_of_transformers() -> None:
    oracle, h, ids, weights, residual = layer()
    experts = TorchExperts(oracle.gate_up_proj, oracle.down_proj)
    assert (experts.experts, experts.hidden) == (EXPERTS, HIDDEN)
    expected = residual + oracle(h, ids.long(), weights)
    torch.testing.assert_close(experts.add_to(h, ids, weights, residual), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_two_bytes_an_element_cost_what_they_cost() -> None:
    oracle, h, ids, weights, residual = layer()
    exact = TorchExperts(oracle.gate_up_proj.double(), oracle.down_proj.double())
    narrow = TorchExperts(oracle.gate_up_proj.bfloat16(), oracle.down_proj.bfloat16())
    expected = exact.add_to(h.double(), ids, weights, residual.double())
    out = narrow.add_to(h.bfloat16(), ids, weights, residual.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() / expected.norm() < 1e-2


@torch.no_grad()
def test_ids_of_no_expert_add_nothing() -> None:
    oracle, h, ids, weights, residual = layer()
    ids[3], ids[4] = -1, EXPERTS
    out = TorchExperts(oracle.gate_up_proj, oracle.down_proj).add_to(h, ids, weights, residual)
    assert torch.equal(out[3:5], residual[3:5])
    assert not torch.equal(out[5], residual[5])


def test_nothing_to_add_to_is_zero() -> None:
    oracle, h, ids, weights, residual = layer()
    experts = TorchExperts(oracle.gate_up_proj, oracle.down_proj)
    expected = experts.add_to(h, ids, weights, torch.zeros_like(residual))
    assert torch.equal(experts.add_to(h, ids, weights, None), expected)

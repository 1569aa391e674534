"""Experts without a gate: the square of ReLU between two products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aengine.kernels.experts.rule import ExpertRule
from aengine.kernels.torch_kernels import TorchKernels

UNGATED = ExpertRule(gated=False)


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    up, down, h = torch.randn(4, 24, 16), torch.randn(4, 16, 24), torch.randn(5, 16)
    ids = torch.tensor([[0, 3], [1, 2], [2, 2], [3, 0], [-1, -1]], dtype=torch.int32)  # the last one is padding
    weights = torch.rand(5, 2)
    out = TorchKernels().experts(up, down, UNGATED).add_to(h, ids, weights, None)
    for token in range(4):
        rows = [F.linear(F.relu(F.linear(h[token], up[expert])) ** 2, down[expert]) for expert in ids[token].tolist()]
        torch.testing.assert_close(out[token], sum(w * row for w, row in zip(weights[token], rows)))
    assert not out[4].any()

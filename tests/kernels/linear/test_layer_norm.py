"""LayerNorms against those of transformers, and where the kernels of a GPU compute RMS norms themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from aengine.kernels.experts.routing.router import Router
from aengine.kernels.linear.base import Norm
from aengine.kernels.linear.layer_norm import HeadLayerNorms, LayerNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_transformers(dtype: torch.dtype) -> None:
    x = (torch.randn(5, 6 * 8) * 3 + 2).to(dtype)
    weight, bias = torch.rand(48).to(dtype) + 0.5, torch.randn(48).to(dtype)
    torch_norm, cohere, heads = nn.LayerNorm(48, 1e-3, dtype=dtype), CohereLayerNorm(48, 1e-3), CohereLayerNorm((6, 8))
    with torch.no_grad():
        torch_norm.weight.copy_(weight)
        torch_norm.bias.copy_(bias)
        cohere.weight.copy_(weight)
        heads.weight.copy_(weight.view(6, 8))
    limits = {"rtol": 2**-8 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-6}
    pairs: list[tuple[Norm, torch.Tensor]] = [
        (LayerNorm(weight, 1e-3, bias), torch_norm(x)),
        (LayerNorm(weight, 1e-3), cohere(x)),
        (HeadLayerNorms(weight.view(6, 8), 1e-5), heads(x.view(5, 6, 8)).flatten(1)),
    ]
    for norm, expected in pairs:
        torch.testing.assert_close(norm(x), expected.detach(), **limits)
        torch.testing.assert_close(norm.add_to(x, x.clone()), (x + expected).detach(), **limits)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [pytest.param(1, id="tiny-one"), pytest.param(3, id="tiny-few")])
def test_a_product_and_a_router_do_not_compute_it(rows: int, device: torch.device) -> None:
    triton = pytest.importorskip("aengine.kernels.triton_kernels")
    kernels = triton.TritonKernels()
    norm = LayerNorm(torch.rand(1024, device=device) + 0.5, 1e-5, torch.randn(1024, device=device))
    x, weight = torch.randn(rows, 1024, device=device) + 1, torch.randn(32, 1024, device=device) / 32
    linear = kernels.dense(weight, None)
    torch.testing.assert_close(linear.apply(x, norm=norm), linear.apply(norm(x)))
    slots = torch.full((rows,), 16, device=device)
    route = kernels.route(weight, None, Router(2))
    for got, expected in zip(route.after(norm, x, slots, 16), route.after(None, norm(x), slots, 16)):
        torch.testing.assert_close(got, expected)

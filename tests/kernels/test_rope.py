from __future__ import annotations

import pytest
import torch

from aengine.kernels.heads import Heads
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

rope = pytest.importorskip("aengine.kernels.rope")
pytestmark = pytest.mark.gpu

REFERENCE = TorchKernels()
PAGE = 16


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [pytest.param(3, 3, 1, 16, id="tiny"), (1, 32, 8, 128), (130, 14, 2, 64), (7, 16, 8, 128), (5, 4, 4, 256)],
)
def test_norm_rotation_and_cache_are_the_references(
    tokens: int, heads: int, kv_heads: int, dim: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device).to(dtype)
    weights = [torch.rand(dim, device=device).to(dtype) + 0.5 if normed else None for _ in "qk"]
    cut = Heads(heads, *weights, 1e-6)
    angles = torch.rand(500, dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 500, (tokens,), device=device)
    pages = tokens // PAGE + 3
    slots = PAGE + torch.randperm((pages - 1) * PAGE, device=device)[:tokens]
    caches = tuple(torch.randn(pages, PAGE, kv_heads, dim, device=device).to(dtype) for _ in "kv")
    expected_caches = caches[0].clone(), caches[1].clone()
    before = qkv.clone()

    out = rope.qk_norm_rope_store(qkv, cut, cos_sin, positions, caches, slots)
    expected = REFERENCE.qk_norm_rope_store(qkv, cut, cos_sin, positions, expected_caches, slots)

    limit = tolerance(dtype)
    assert out.shape == expected.shape
    assert relative_error(out, expected) < limit
    for name, got, want in zip("kv", caches, expected_caches, strict=True):
        assert relative_error(got, want) < limit, f"{name} cache"
    assert torch.equal(qkv, before)


def test_caches_that_are_not_contiguous_are_refused_tiny(device: torch.device) -> None:
    cache = torch.zeros(2, 1, PAGE, 16, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        rope.qk_norm_rope_store(
            torch.zeros(1, 48, device=device), Heads(1), torch.zeros(1, 16, device=device),
            torch.zeros(1, dtype=torch.int64, device=device), (cache[:, ::2], cache[:, ::2]),
            torch.zeros(1, dtype=torch.int64, device=device),
        )  # fmt: skip

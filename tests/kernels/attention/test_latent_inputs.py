"""Latents in the cache, and rotated queries, equal the reference's."""

from __future__ import annotations

import pytest
import torch

from aengine.kernels.attention.heads import LatentHeads
from aengine.kernels.kv_scales import FP8
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

latent_inputs = pytest.importorskip("aengine.kernels.attention.inputs").latent_inputs
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kept", ["as-queries", "fp8"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "plain", "rank", "rotated"),
    [
        pytest.param(7, 3, 12, 24, 8, id="tiny"),
        pytest.param(1, 16, 128, 512, 64, id="one"),
        pytest.param(300, 20, 192, 512, 64, id="many"),
    ],
)
def test_both_equal_the_reference(
    tokens: int, heads: int, plain: int, rank: int, rotated: int, interleaved: bool, kept: str,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    beside = torch.randn(tokens, 40 + rank + rotated, device=device).to(dtype)
    q = torch.randn(tokens, heads, plain + rotated, device=device).to(dtype)
    weight = 1 + 0.2 * torch.randn(rank, device=device).to(dtype)
    angles = torch.rand(50, rotated // 2, device=device) * 6
    cos_sin, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.randint(0, 50, (tokens,), device=device)
    slots = torch.randperm(tokens + 20, device=device)[:tokens]
    norm = LatentHeads(weight, 1e-6, rotated, interleaved)
    shape, scale = (2, -(-(tokens + 20) // 16), 16, 1, rank + rotated), 0.02 if kept == "fp8" else 1.0
    caches = torch.zeros(shape, device=device, dtype=FP8 if kept == "fp8" else dtype)
    beside[0, 40:43] = torch.tensor([300.0, 0.0, -200.0])
    outs = torch.full((2, tokens, heads, rank + rotated), 7.0, device=device, dtype=dtype)
    latent_inputs(beside[:, 40:], q, norm, cos_sin, positions, caches[0], slots, outs[0], scale)
    TorchKernels().latent_inputs(beside[:, 40:], q, norm, cos_sin, positions, caches[1], slots, outs[1], scale)
    # A number between two codes may become either, and the interpreter rounds differently.
    codes = 1e-2 if device.type == "cuda" else 0.13
    assert relative_error(caches[0].float(), caches[1].float()) < (codes if kept == "fp8" else tolerance(dtype))
    assert relative_error(outs[0], outs[1]) < tolerance(dtype)
    assert bool((outs[0][..., :rank] == 7).all())


def test_a_cache_of_another_type_is_refused_tiny(device: torch.device) -> None:
    latents, q = torch.zeros(1, 24, device=device), torch.zeros(1, 2, 12, device=device)
    norm = LatentHeads(torch.ones(16, device=device), 1e-6, 8, True)
    place = torch.zeros(1, dtype=torch.int64, device=device)
    cache = torch.zeros(1, 16, 1, 24, device=device, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"in torch\.float32 or FP8"):
        latent_inputs(latents, q, norm, torch.zeros(1, 8, device=device), place, cache, place, latents.view(1, 1, 24))

from __future__ import annotations

from typing import Literal

import pytest
import torch

from aengine.kernels.attention.heads import Heads
from aengine.kernels.kv_scales import FP8, KVScales
from aengine.kernels.torch_kernels import TorchKernels
from tests.kernels.conftest import relative_error, tolerance

inputs = pytest.importorskip("aengine.kernels.attention.inputs")
pytestmark = pytest.mark.gpu

REFERENCE = TorchKernels()
PAGE = 16


@pytest.mark.thinned
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"),
    [
        pytest.param(3, 3, 1, 16, id="tiny"),
        pytest.param(3, 3, 1, 24, id="tiny-24"),
        pytest.param(3, 0, 2, 16, id="tiny-without-queries"),
        *[(1, 32, 8, 128), (130, 14, 2, 64), (7, 16, 8, 128), (5, 4, 4, 256), (130, 0, 8, 128)],
        *[(130, 32, 32, 96), (1, 32, 8, 80), (5, 4, 4, 100)],
    ],
)
def test_norm_rotation_and_cache_equal_the_reference(
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

    out = inputs.qk_norm_rope_store(qkv, cut, cos_sin, positions, caches, slots)
    expected = REFERENCE.qk_norm_rope_store(qkv, cut, cos_sin, positions, expected_caches, slots)

    limit = tolerance(dtype)
    assert out.shape == expected.shape
    assert not heads or relative_error(out, expected) < limit
    for name, got, want in zip("kv", caches, expected_caches, strict=True):
        assert relative_error(got, want) < limit, f"{name} cache"
    assert torch.equal(qkv, before)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "rotary"),
    [
        pytest.param(3, 3, 1, 16, 4, id="tiny"),
        pytest.param(3, 3, 1, 40, 32, id="tiny-40"),
        *[(130, 16, 4, 256, 64), (1, 16, 2, 256, 64), (9, 8, 2, 128, 64), (9, 32, 8, 80, 32)],
    ],
)
def test_a_part_of_each_head_is_rotated_and_gates_are_skipped(
    tokens: int, heads: int, kv_heads: int, dim: int, rotary: int, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    queries = heads * (1 + gated)
    qkv = torch.randn(tokens, (queries + 2 * kv_heads) * dim, device=device).to(dtype)
    weights = [torch.rand(dim, device=device) + 0.5 for _ in "qk"]  # float32, like weights of the form 1 + w
    angles = torch.rand(500, rotary // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 500, (tokens,), device=device)
    slots = PAGE + torch.arange(tokens, device=device)
    caches = tuple(torch.zeros(tokens // PAGE + 2, PAGE, kv_heads, dim, device=device).to(dtype) for _ in "kv")
    expected = caches[0].clone(), caches[1].clone()
    cut = Heads(heads, *weights, 1e-6, gated=gated)

    out = inputs.qk_norm_rope_store(qkv, cut, cos_sin, positions, caches, slots)
    plain = qkv.view(tokens, -1, dim)
    if gated:
        plain = torch.cat((plain[:, : 2 * heads : 2], plain[:, 2 * heads :]), dim=1)
    want = REFERENCE.qk_norm_rope_store(
        plain.flatten(1), Heads(heads, *weights, 1e-6), cos_sin, positions, expected, slots
    )

    limit = tolerance(dtype)
    assert relative_error(out, want) < limit
    for got, kept in zip(caches, expected, strict=True):
        assert relative_error(got, kept) < limit
    unturned = torch.cat((torch.ones(500, rotary // 2), torch.zeros(500, rotary // 2)), dim=1).to(device)
    still = inputs.qk_norm_rope_store(qkv, cut, unturned, positions, caches, slots)
    assert torch.equal(still[..., rotary:], out[..., rotary:])


@pytest.mark.parametrize(
    ("dim", "rotary"), [pytest.param(16, 16, id="tiny"), pytest.param(24, 8, id="tiny-24"), (128, 64), (96, 96)]
)
def test_pairs_of_neighbours_are_rotated(dim: int, rotary: int, dtype: torch.dtype, device: torch.device) -> None:
    """The values and the elements that are not rotated keep their places."""
    qkv = torch.randn(5, 7 * dim, device=device).to(dtype)
    angles = torch.rand(500, rotary // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.randint(0, 500, (5,), device=device), PAGE + torch.arange(5, device=device)
    q_norm, k_norm = (torch.rand(dim, device=device).to(dtype) + 0.5 for _ in "qk")
    cut = Heads(3, q_norm, k_norm, 1e-6, interleaved=True)
    caches, expected = (tuple(torch.zeros(2, PAGE, 2, dim, device=device).to(dtype) for _ in "kv") for _ in range(2))

    out = inputs.qk_norm_rope_store(qkv, cut, cos_sin, positions, caches, slots)
    want = REFERENCE.qk_norm_rope_store(qkv, cut, cos_sin, positions, expected, slots)

    assert relative_error(out, want) < tolerance(dtype)
    for got, kept in zip(caches, expected, strict=True):
        assert relative_error(got, kept) < tolerance(dtype)
    assert torch.equal(caches[1][1, :5], qkv.view(5, 7, dim)[:, 5:])


@pytest.mark.parametrize("kv", ["both", "keys", "nothing"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [pytest.param(3, 3, 2, 16, id="tiny"), (130, 16, 4, 256), (7, 32, 4, 512)]
)
def test_values_are_normed_and_may_be_keys_or_others(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    kv: Literal["both", "keys", "nothing"],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    projected = {"both": 2, "keys": 1, "nothing": 0}[kv]
    qkv = torch.randn(tokens, (heads + projected * kv_heads) * dim, device=device).to(dtype)
    q_norm, k_norm = (torch.rand(dim, device=device).to(dtype) + 0.5 for _ in "qk")
    cut = Heads(heads, q_norm, k_norm if projected else None, 1e-6, v_norm=projected > 0, kv=kv)
    angles = torch.rand(500, dim // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.randint(0, 500, (tokens,), device=device)
    slots = PAGE + torch.arange(tokens, device=device)
    caches = tuple(torch.randn(tokens // PAGE + 3, PAGE, kv_heads, dim, device=device).to(dtype) for _ in "kv")
    before = caches[0].clone(), caches[1].clone()
    expected_caches = caches[0].clone(), caches[1].clone()

    out = inputs.qk_norm_rope_store(qkv, cut, cos_sin, positions, caches, slots)
    expected = REFERENCE.qk_norm_rope_store(qkv, cut, cos_sin, positions, expected_caches, slots)

    assert relative_error(out, expected) < tolerance(dtype)
    for got, want, was in zip(caches, expected_caches, before, strict=True):
        assert relative_error(got, want) < tolerance(dtype)
        assert torch.equal(got, was) == (kv == "nothing")
    if kv == "keys":  # before their norm and rotation
        keys = qkv.view(tokens, -1, dim)[:, heads:].float()
        values = caches[1].flatten(0, 1)[slots].float()
        assert relative_error(values, keys * (keys.square().mean(-1, keepdim=True) + 1e-6).rsqrt()) < tolerance(dtype)


@pytest.mark.thinned
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("tokens", "dim", "rotated"),
    [
        pytest.param(3, 16, 4, id="tiny"),
        pytest.param(3, 16, 0, id="tiny-nothing"),
        (130, 128, 64),
        (7, 256, 64),
        (5, 64, 48),
    ],
)
def test_a_part_of_each_head_is_rotated(
    tokens: int, dim: int, rotated: int, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = torch.randn(tokens, 5 * dim, device=device).to(dtype)
    weights = [torch.rand(dim, device=device).to(dtype) + 0.5 if normed else None for _ in "qk"]
    cut = Heads(3, *weights, 1e-6)
    angles = torch.rand(50, rotated // 2, device=device) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.arange(tokens, device=device) % 50, torch.arange(tokens, device=device)
    pages = tokens // PAGE + 1
    caches, expected_caches = torch.zeros(2, 2, pages, PAGE, 1, dim, device=device, dtype=dtype)
    out = inputs.qk_norm_rope_store(qkv, cut, cos_sin, positions, tuple(caches), slots)
    expected = REFERENCE.qk_norm_rope_store(qkv, cut, cos_sin, positions, tuple(expected_caches), slots)
    assert relative_error(out, expected) < tolerance(dtype)
    assert relative_error(caches, expected_caches) < tolerance(dtype)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [pytest.param(3, 3, 1, 16, id="tiny"), (130, 32, 8, 128), (7, 14, 2, 64)]
)
def test_an_fp8_cache_gets_the_codes_of_the_reference(
    tokens: int, heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    """The interpreter gets numbers that need no rounding, because it rounds differently and has no infinity."""
    exact = device.type == "cpu"
    dtype = torch.float16 if exact else torch.bfloat16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=device)
    qkv = (torch.randint(8, 16, qkv.shape).float().copysign(qkv) if exact else qkv).to(dtype)
    qkv[:, -2], qkv[:, -1] = 3e4, -3e4  # beyond the largest code
    cos_sin = torch.cat((torch.ones(9, dim // 2), torch.zeros(9, dim // 2)), dim=1).to(device)
    positions, slots = torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device)
    pages = tokens // PAGE + 1
    caches, expected = torch.zeros(2, 2, pages, PAGE, kv_heads, dim, device=device).to(FP8)
    scales = KVScales(0.25, 2.0) if exact else KVScales(0.3, 1.7)
    inputs.qk_norm_rope_store(qkv, Heads(heads), cos_sin, positions, tuple(caches), slots, scales)
    REFERENCE.qk_norm_rope_store(qkv, Heads(heads), cos_sin, positions, tuple(expected), slots, scales)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))
    assert caches[1].float().flatten(0, 1)[slots, -1, -2:].abs().eq(448.0).all()


def test_numbers_that_are_not_finite_are_nan_in_an_fp8_cache(device: torch.device) -> None:
    inf, nan = float("inf"), float("nan")
    qkv = torch.tensor([[1.0] * 48 + [nan, inf, -inf, 1e-3] + [500.0] * 12], device=device, dtype=torch.bfloat16)
    one = torch.zeros(1, dtype=torch.int64, device=device)
    caches = torch.zeros(2, 1, PAGE, 1, 16, device=device).to(FP8)
    cos_sin = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), dim=1).to(device)
    inputs.qk_norm_rope_store(qkv, Heads(2), cos_sin, one, (caches[0], caches[1]), one)
    values = caches[1].float()[0, 0, 0].tolist()
    assert [value != value for value in values] == [True] * 3 + [False] * 13
    assert values[3:5] == [2**-9, 448.0]


def test_a_projection_may_have_further_columns_tiny(dtype: torch.dtype, device: torch.device) -> None:
    """Gates with a projection of their own are in the same product, after the values."""
    wide = torch.randn(5, (3 + 2 + 3) * 16, device=device).to(dtype)
    weight = torch.ones(16, device=device)
    cut, angles, rows = Heads(3, weight, weight, 1e-6), torch.rand(8, 8, device=device), torch.arange(5, device=device)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    results = []
    for qkv in (wide[:, : 5 * 16], wide[:, : 5 * 16].contiguous()):
        caches = torch.zeros(2, 1, PAGE, 1, 16, device=device, dtype=dtype)
        results.append((inputs.qk_norm_rope_store(qkv, cut, cos_sin, rows, (caches[0], caches[1]), rows), caches))
    assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
    reference = REFERENCE.qk_norm_rope_store(wide[:, : 5 * 16], cut, cos_sin, rows, (caches[0], caches[1]), rows)
    assert relative_error(results[0][0], reference) < tolerance(dtype)


def test_caches_that_are_not_contiguous_are_refused_tiny(device: torch.device) -> None:
    cache = torch.zeros(2, 1, PAGE, 16, device=device).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        inputs.qk_norm_rope_store(
            torch.zeros(1, 48, device=device), Heads(1), torch.zeros(1, 16, device=device),
            torch.zeros(1, dtype=torch.int64, device=device), (cache[:, ::2], cache[:, ::2]),
            torch.zeros(1, dtype=torch.int64, device=device),
        )  # fmt: skip

"""The reference kernels against the formulas in float64, and against transformers' modules bit for bit in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from aengine.kernels.attention.heads import Heads
from aengine.kernels.kv_scales import FP8, KVScales, encode
from aengine.kernels.torch_kernels import TorchKernels

KERNELS = TorchKernels()
EPS = 1e-5


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("tokens", [1, 5])
def test_rms_norm(tokens: int) -> None:
    x, weight = torch.randn(tokens, 24), torch.randn(24)
    torch.testing.assert_close(KERNELS.norm(weight, EPS)(x).double(), norm64(x, weight), atol=1e-5, rtol=1e-5)


def test_rms_norm_rounds_where_transformers_rounds() -> None:
    x, weight = torch.randn(7, 64, dtype=torch.bfloat16) * 3, torch.randn(64, dtype=torch.bfloat16)
    module = Qwen3RMSNorm(64, eps=EPS).to(torch.bfloat16)
    module.weight.data.copy_(weight)
    assert torch.equal(KERNELS.norm(weight, EPS)(x), module(x))


def test_what_comes_before_and_after_a_product() -> None:
    x, weight, residual, norm = torch.randn(3, 7), torch.randn(8, 7), torch.randn(3, 8), torch.randn(7)
    linear, normed = KERNELS.dense(weight, None), KERNELS.norm(norm, EPS)
    expected = residual + linear.apply(x)
    assert torch.equal(linear.apply(x, residual=residual), expected)
    assert torch.equal(linear.apply(x, norm=normed), linear.apply(normed(x)))


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(4, 6), torch.randn(4, 6)
    expected = gate.double() * torch.sigmoid(gate.double()) * up.double()
    torch.testing.assert_close(KERNELS.silu_mul(torch.cat((gate, up), 1)).double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bias", [None, torch.randn(5)])
def test_linear(bias: Tensor | None) -> None:
    x, weight = torch.randn(3, 7), torch.randn(5, 7)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    linear = KERNELS.dense(weight, bias)
    assert (linear.inputs, linear.outputs) == (7, 5)
    torch.testing.assert_close(linear.apply(x).double(), expected, atol=1e-5, rtol=1e-5)


HEADS, KV_HEADS, DIM, PAGE = 4, 2, 6, 3


@pytest.mark.parametrize("normed", [False, True])
def test_qk_norm_rope_store(normed: bool) -> None:
    qkv = torch.randn(5, (HEADS + 2 * KV_HEADS) * DIM)
    q_weight, k_weight = (torch.randn(DIM), torch.randn(DIM)) if normed else (None, None)
    angles = torch.rand(11, DIM // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.tensor([3, 0, 10, 3, 7])
    slots = torch.tensor([4, 14, 5, 9, 11])
    k_cache, v_cache = torch.full((2, 5, PAGE, KV_HEADS, DIM), -1.0)
    before = qkv.clone()
    q = KERNELS.qk_norm_rope_store(
        qkv, Heads(HEADS, q_weight, k_weight, EPS), cos_sin, positions, (k_cache, v_cache), slots
    )

    def expected(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x.double() if weight is None else norm64(x, weight)
        angle = angles.double()[positions].unsqueeze(1)  # [tokens, 1, DIM / 2]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)

    heads = qkv.view(5, -1, DIM)
    k, v = (cache.view(-1, KV_HEADS, DIM)[slots] for cache in (k_cache, v_cache))
    torch.testing.assert_close(q.double(), expected(heads[:, :HEADS], q_weight), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k.double(), expected(heads[:, HEADS:-KV_HEADS], k_weight), atol=1e-5, rtol=1e-5)
    assert torch.equal(v, heads[:, -KV_HEADS:])
    assert torch.equal(qkv, before)
    for cache in (k_cache, v_cache):
        flat = cache.view(-1, KV_HEADS, DIM)
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert (flat[untouched] == -1).all()


def test_rotation_matches_transformers() -> None:
    q, k = torch.randn(1, HEADS, 5, DIM), torch.randn(1, KV_HEADS, 5, DIM)
    angles = torch.rand(5, DIM // 2) * 6
    doubled = torch.cat((angles, angles), dim=1).unsqueeze(0)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, doubled.cos(), doubled.sin())
    qkv = torch.cat((q, k, k), dim=1).transpose(1, 2).flatten(2).squeeze(0)
    caches = torch.zeros(2, 2, PAGE, KV_HEADS, DIM)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    got_q = KERNELS.qk_norm_rope_store(
        qkv, Heads(HEADS), table, torch.arange(5), (caches[0], caches[1]), torch.arange(5)
    )
    torch.testing.assert_close(got_q, expected_q[0].transpose(0, 1), atol=1e-6, rtol=1e-6)
    got_k = caches[0].view(-1, KV_HEADS, DIM)[:5]
    torch.testing.assert_close(got_k, expected_k[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def test_padding_tokens_may_share_a_slot_of_page_0() -> None:
    qkv = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM)
    caches = torch.zeros(2, 3, PAGE, KV_HEADS, DIM)
    table = torch.zeros(4, DIM)
    KERNELS.qk_norm_rope_store(
        qkv, Heads(HEADS), table, torch.tensor([2, 0, 0]), (caches[0], caches[1]), torch.tensor([7, 0, 0])
    )
    assert torch.equal(caches[1].view(-1, KV_HEADS, DIM)[7], qkv[0].view(-1, DIM)[-KV_HEADS:])
    assert (caches[:, 1] == 0).all()


def test_an_fp8_cache_keeps_codes() -> None:
    """value = code * scale to within half a step of three bits, at the slots that were named and nowhere else."""
    qkv, scales = torch.randn(3, (HEADS + 2 * KV_HEADS) * DIM), KVScales(0.25, 0.01)
    table = torch.cat((torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2)), dim=1)  # turns nothing
    caches = torch.zeros(2, 3, PAGE, KV_HEADS, DIM).to(FP8)
    slots = torch.tensor([7, 3, 5])
    KERNELS.qk_norm_rope_store(
        qkv, Heads(HEADS), table, torch.zeros(3, dtype=torch.int64), (caches[0], caches[1]), slots, scales
    )
    heads = qkv.view(3, -1, DIM)
    for cache, kept, scale in zip(
        caches, (heads[:, HEADS:-KV_HEADS], heads[:, -KV_HEADS:]), (scales.key, scales.value), strict=True
    ):
        flat = cache.float().view(-1, KV_HEADS, DIM)
        torch.testing.assert_close(flat[slots] * scale, kept, rtol=2**-4, atol=scale * 2**-10)
        assert flat.count_nonzero() == flat[slots].count_nonzero()


def test_codes_end_at_448_and_keep_nan() -> None:
    x = torch.tensor([1e9, -1e9, 449.0, 1.0, float("nan"), float("inf"), float("-inf")])
    codes = encode(x, 1.0).float()
    assert codes[:4].tolist() == [448.0, -448.0, 448.0, 1.0]
    assert codes[4:].isnan().all()
    assert x[0] == 1e9  # not written to

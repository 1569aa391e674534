"""Single queries over pages of latents against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.kernels.kv_scales import FP8
from tests.kernels.attention.test_decode_attention import paged, reference
from tests.kernels.conftest import relative_error, tolerance

decode = pytest.importorskip("aengine.kernels.attention.latent_decode")
LatentConfig = pytest.importorskip("aengine.kernels.attention.config").LatentConfig
pytestmark = pytest.mark.gpu

TINY = [
    pytest.param([5, 0, 130, 1], 2, 16, 16, 16, id="tiny-mixed"),
    pytest.param([300], 3, 24, 8, 16, id="tiny-split-and-padded"),
    pytest.param([70, 64, 9], 40, 16, 4, 4, id="tiny-two-tiles-page-of-4"),
    pytest.param([70, 9], 2, 32, 16, 12, id="tiny-page-of-12"),
    pytest.param([33] * 20, 1, 16, 16, 64, id="tiny-many-page-of-64"),
]
FULL = [
    pytest.param([1000], 16, 512, 64, 16, id="one"),
    pytest.param([100_000], 20, 512, 64, 16, id="long"),
    pytest.param([1, 2, 17, 0, 4096, 63, 64, 65], 16, 512, 64, 16, id="uneven"),
    pytest.param([777] * 100, 20, 512, 64, 16, id="many"),
    pytest.param([3000, 5, 900], 128, 512, 64, 32, id="four-tiles"),
    pytest.param([333] * 5, 5, 256, 32, 8, id="narrow"),
]


def latents(
    lengths: list[int], heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, cache, page table and lengths. Unused cache entries are NaN."""
    q, cache, _, table, lens = paged(lengths, heads, 1, rank + turned, page, dtype, device)
    return q, cache, table, lens


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("lengths", "heads", "rank", "turned", "page"), TINY + FULL)
def test_every_head_attends_to_the_same_latents(
    lengths: list[int], heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, cache, table, lens = latents(lengths, heads, rank, turned, page, dtype, device)
    scale = (rank + turned) ** -0.5
    attend = decode.LatentDecode()
    out = attend(q, cache, rank, table, lens, scale)
    expected = reference(q, cache, cache, table, lens, scale)[..., :rank]
    assert relative_error(out, expected) < tolerance(dtype)
    assert torch.equal(out, attend(q, cache, rank, table, lens, scale))  # parts are added up in order
    assert not out[lens == 0].any()


def coded(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cache in FP8, and its codes as float32 numbers. Unused entries are NaN in both."""
    codes = (cache.float() * 20).clamp(-448, 448).to(FP8)
    return codes, codes.float()


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("lengths", "heads", "rank", "turned", "page"), TINY + FULL)
def test_codes_are_latents_in_fp8(
    lengths: list[int], heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, cache, table, lens = latents(lengths, heads, rank, turned, page, dtype, device)
    codes, exact = coded(cache)
    scale = 0.05 * (rank + turned) ** -0.5
    attend = decode.LatentDecode()
    out = attend(q, codes, rank, table, lens, scale, value_scale=0.05)
    expected = reference(q, exact, exact, table, lens, scale)[..., :rank] * 0.05
    assert relative_error(out, expected) < tolerance(dtype)
    assert torch.equal(out, attend(q, codes, rank, table, lens, scale, value_scale=0.05))
    assert not out[lens == 0].any()


@pytest.mark.parametrize("size", [1e-30, 1e5, 1e30])
def test_queries_beyond_float16_keep_their_size_tiny(size: float, device: torch.device) -> None:
    """Products of bfloat16 queries and codes are computed in float16."""
    q, cache, table, lens = latents([40, 7, 90], 4, 16, 16, 16, torch.bfloat16, device)
    q[:, 1], q[:, 2, :16], q[:, 3, 16:] = 0.0, 0.0, 0.0
    q, (codes, exact) = (q.float() * size).to(q.dtype), coded(cache)
    out = decode.LatentDecode()(q, codes, 16, table, lens, 0.01 / size, value_scale=0.05)
    expected = reference(q, exact, exact, table, lens, 0.01 / size)[..., :16] * 0.05
    assert relative_error(out, expected) < 6e-3


@pytest.mark.parametrize("crowd", [1, 4])
def test_the_result_does_not_depend_on_the_number_of_workers_tiny(
    crowd: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, cache, table, lens = latents([5, 90, 0, 200, 33], 4, 16, 16, 16, torch.float32, device)
    config = LatentConfig(block=16, stages=2, warps=4, crowd=crowd)
    monkeypatch.setattr(decode, "latent_decode_config", lambda *_: config)
    out = decode.LatentDecode()(q, cache, 16, table, lens, 0.25)
    assert relative_error(out, reference(q, cache, cache, table, lens, 0.25)[..., :16]) < tolerance(torch.float32)


def test_rows_of_length_minus_1_are_not_touched_tiny(device: torch.device) -> None:
    q, cache, table, lens = latents([70, 9, 1, 1], 2, 16, 16, 16, torch.float32, device)
    expected = decode.LatentDecode()(q, cache, 16, table, lens, 0.25)
    lens[2:] = -1
    out = torch.full_like(expected, 7.0)
    decode.LatentDecode()(q, cache, 16, table, lens, 0.25, out=out)
    assert relative_error(out[:2], expected[:2]) < tolerance(torch.float32)  # fewer rows are divided differently
    assert bool((out[2:] == 7).all())


def test_a_layout_it_cannot_read_is_refused_tiny(device: torch.device) -> None:
    q, cache, table, lens = latents([5], 2, 16, 16, 16, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous"):
        decode.LatentDecode()(q, cache[:, ::2], 16, table, lens, 1.0)
    with pytest.raises(ValueError, match="for queries of"):
        decode.LatentDecode()(q, cache.half(), 16, table, lens, 1.0)
    with pytest.raises(ValueError, match="for queries of"):
        decode.LatentDecode()(q, cache.to(FP8), 15, table, lens, 1.0)

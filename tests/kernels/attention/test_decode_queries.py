"""Rows with several query tokens, as drafts need: each query sees the positions up to its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.kernels.attention.config import DecodeConfig
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import encode
from tests.kernels.attention.test_decode_attention import K_SCALE, V_SCALE, narrow_dtype, paged, reference
from tests.kernels.conftest import relative_error, tolerance

decode_attention = pytest.importorskip("aengine.kernels.attention.decode_attention")
latent_decode = pytest.importorskip("aengine.kernels.attention.latent_decode")
pytestmark = pytest.mark.gpu


def step(
    lengths: list[int], heads: int, kv_heads: int, dim: int, queries: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries of all rows, caches, page table and lengths. Memory outside of contexts is NaN."""
    _, *kept = paged(lengths, heads, kv_heads, dim, 16, dtype, device)
    q = torch.randn(len(lengths) * queries, heads, dim, device=device).to(dtype)
    return q, kept[0], kept[1], kept[2], kept[3]


def of_each_query(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor, scale: float, queries: int,
    window: int | None = None, rule: Scores = PLAIN,
) -> Tensor:  # fmt: skip
    """Compute each query in float64 as the only one of its row."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for nth in range(queries):
        own = (lens - (queries - 1 - nth)).clamp(min=0)
        out[nth::queries] = reference(q[nth::queries], k, v, table, own, scale, window, rule)
    return out


TINY = [
    pytest.param([5, 0, 130, 1], 4, 2, 16, 2, id="tiny-mixed"),
    pytest.param([130, 17], 3, 3, 24, 5, id="tiny-split"),
    pytest.param([33, 64], 32, 2, 16, 5, id="tiny-groups-of-16-in-overlapping-tiles"),
    pytest.param([40, 7], 2, 1, 16, 17, id="tiny-sixteen-drafts"),
]
FULL = [
    pytest.param([1000], 32, 8, 128, 5, id="one"),
    pytest.param([100_000], 32, 8, 128, 3, id="long"),
    pytest.param([1, 2, 17, 0, 4096, 63, 64, 65], 32, 8, 128, 4, id="uneven"),
    pytest.param([777] * 100, 14, 2, 64, 3, id="groups-of-7"),
    pytest.param([900, 5000], 64, 4, 128, 5, id="groups-of-16"),
    pytest.param([333] * 5, 8, 8, 256, 2, id="dim-256"),
    pytest.param([333, 0, 4000], 16, 2, 256, 6, id="groups-of-8-of-dim-256"),
    pytest.param([900, 5000, 0, 33], 32, 32, 96, 2, id="dim-96"),
    pytest.param([333] * 70, 32, 8, 80, 5, id="dim-80"),
    pytest.param([20_000, *[300] * 140, 0, 31, 1], 28, 4, 128, 2, id="many"),
    pytest.param([4000] * 16, 32, 8, 128, 17, id="sixteen-drafts"),
]


@pytest.mark.thinned(strength=1)
@pytest.mark.interpreted(3)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "queries"), TINY + FULL)
def test_each_query_sees_the_positions_up_to_its_own(
    lengths: list[int], heads: int, kv_heads: int, dim: int, queries: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = step(lengths, heads, kv_heads, dim, queries, dtype, device)
    decode = decode_attention.PagedDecode()
    out = torch.full_like(inputs[0], float("nan"))
    decode(*inputs, dim**-0.5, out=out, queries=queries)
    again = decode(*inputs, dim**-0.5, queries=queries)
    assert relative_error(out, of_each_query(*inputs, dim**-0.5, queries)) < tolerance(dtype)
    assert torch.equal(out, again)  # parts are added up in order, and counters are 0 again


@pytest.mark.thinned(strength=1)
@pytest.mark.interpreted(2)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "queries"), TINY + FULL)
def test_queries_that_are_not_causal_see_the_whole_row(
    lengths: list[int], heads: int, kv_heads: int, dim: int, queries: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, k, v, table, lens = step(lengths, heads, kv_heads, dim, queries, dtype, device)
    out = decode_attention.PagedDecode()(q, k, v, table, lens, dim**-0.5, queries=queries, causal=False)
    expected = torch.stack([reference(q[i::queries], k, v, table, lens, dim**-0.5) for i in range(queries)], dim=1)
    assert relative_error(out, expected.flatten(0, 1)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [1, 16, 40, 1000])
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [pytest.param([5, 90, 41, 2], 16, id="tiny"), pytest.param([40, 41, 4096, 1001, 0, 16], 128, id="full")],
)
def test_each_query_has_its_own_window(lengths: list[int], dim: int, window: int, device: torch.device) -> None:
    inputs = step(lengths, 4, 2, dim, 3, torch.float32, device)
    out = decode_attention.PagedDecode()(*inputs, 0.3, window=window, queries=3)
    assert relative_error(out, of_each_query(*inputs, 0.3, 3, window)) < tolerance(torch.float32)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.7, False), (None, True), (2.0, True)], ids=["cap", "sinks", "both"])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "queries"),
    [
        pytest.param([5, 0, 90, 300, 1], 6, 2, 16, 3, id="tiny"),
        pytest.param([40, 41, 4096, 1001, 0, 16], 64, 8, 64, 5, id="groups-of-8"),
        pytest.param([777] * 70, 16, 8, 256, 2, id="dim-256"),
        pytest.param([30_000], 8, 4, 128, 4, id="long"),
    ],
)
def test_scores_are_capped_and_each_head_has_its_sink(
    lengths: list[int], heads: int, kv_heads: int, dim: int, queries: int, softcap: float | None, sinks: bool,
    window: int | None, dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    inputs = step(lengths, heads, kv_heads, dim, queries, dtype, device)
    rule = Scores(softcap, torch.randn(heads, device=device) * 3 if sinks else None)
    out = decode_attention.PagedDecode()(*inputs, dim**-0.5, window=window, scores=rule, queries=queries)
    assert relative_error(out, of_each_query(*inputs, dim**-0.5, queries, window, rule)) < tolerance(dtype)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "queries"), [pytest.param([5, 0, 130], 4, 1, 64, 3, id="tiny"), *FULL]
)
def test_codes_are_read_with_their_scales(
    lengths: list[int], heads: int, kv_heads: int, dim: int, queries: int, window: int | None, device: torch.device
) -> None:
    q, k, v, table, lens = step(lengths, heads, kv_heads, dim, queries, narrow_dtype(device), device)
    k, v = encode(k, K_SCALE), encode(v, V_SCALE)
    decode = decode_attention.PagedDecode()
    out = decode(q, k, v, table, lens, 0.1 * K_SCALE, window, value_scale=V_SCALE, queries=queries)
    expected = of_each_query(q, k.float() * K_SCALE, v.float() * V_SCALE, table, lens, 0.1, queries, window)
    assert relative_error(out, expected) < tolerance(q.dtype)


def test_many_parts_of_a_row_are_added_up_in_groups_tiny(device: torch.device) -> None:
    inputs = step([350, 0, 40], 2, 1, 16, 3, torch.float32, device)
    config = DecodeConfig(block=16, stages=2, warps=2, crowd=6, merged=1)
    out = decode_attention.PagedDecode()(*inputs, 0.25, config=config, queries=3)
    assert relative_error(out, of_each_query(*inputs, 0.25, 3)) < tolerance(torch.float32)


def test_queries_that_are_a_part_of_a_wider_tensor_tiny(device: torch.device) -> None:
    q, *kept = step([40, 19], 4, 2, 16, 2, torch.float32, device)
    wide = torch.cat((q, q), dim=1)[:, :4]
    decode = decode_attention.PagedDecode()
    assert torch.equal(decode(wide, *kept, 0.25, queries=2), decode(q, *kept, 0.25, queries=2))


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "rank", "queries"),
    [
        pytest.param([5, 0, 70, 1], 3, 24, 16, 3, id="tiny"),
        pytest.param([40], 20, 24, 16, 4, id="tiny-tiles"),
        pytest.param([1000, 17, 0, 4096], 16, 576, 512, 5, id="few-heads"),
        pytest.param([20_000, *[300] * 40, 2], 128, 576, 512, 2, id="many-heads"),
    ],
)
@pytest.mark.parametrize("codes", [False, True], ids=["plain", "codes"])
def test_each_query_over_latents_sees_the_positions_up_to_its_own(
    lengths: list[int], heads: int, dim: int, rank: int, queries: int, codes: bool, device: torch.device
) -> None:
    q, cache, _, table, lens = step(lengths, heads, 1, dim, queries, narrow_dtype(device), device)
    if codes:
        cache = encode(cache, 1.0)
    decode = latent_decode.LatentDecode()
    out = decode(q, cache, rank, table, lens, 0.1, queries=queries)
    wide = cache.to(q.dtype)
    assert relative_error(out, of_each_query(q, wide, wide, table, lens, 0.1, queries)[..., :rank]) < tolerance(q.dtype)


def test_tokens_that_are_not_whole_rows_are_refused_tiny(device: torch.device) -> None:
    q, k, v, table, lens = step([40, 19], 4, 2, 16, 2, torch.float32, device)
    with pytest.raises(ValueError, match="2 tokens of each row, got 3"):
        decode_attention.PagedDecode()(q[:3], k, v, table, lens, 0.25, queries=2)
    with pytest.raises(ValueError, match="2 tokens of each row, got 3"):
        latent_decode.LatentDecode()(q[:3], k[:, :, :1].contiguous(), 8, table, lens, 0.25, queries=2)

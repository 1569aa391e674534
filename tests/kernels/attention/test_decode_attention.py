from __future__ import annotations

import pytest
import torch

from aengine.kernels.attention.config import DecodeConfig
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import encode
from tests.kernels.conftest import relative_error, tolerance

decode_attention = pytest.importorskip("aengine.kernels.attention.decode_attention")
pytestmark = pytest.mark.gpu


def reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    rule: Scores = PLAIN,
) -> torch.Tensor:
    """Compute each row in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        low = max(0, length - window) if window else 0
        k, v = (cache[page_table[row].long()].flatten(0, 1)[low:length].double() for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,shd->hs", q[row].double(), k.repeat_interleave(group, 1)) * scale
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        total = scores.logsumexp(-1) if rule.sinks is None else scores.logsumexp(-1).logaddexp(rule.sinks.double())
        out[row] = torch.einsum("hs,shd->hd", (scores - total[:, None]).exp(), v.repeat_interleave(group, 1))
    return out


def paged(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, caches, page table and lengths. Unused cache entries are NaN, like stale contents may be."""
    width = max(1, -(-max(lengths) // page))
    pages = sum(-(-length // page) for length in lengths) + 1
    caches = [torch.full((pages, page, kv_heads, dim), float("nan"), device=device).to(dtype) for _ in "kv"]
    for cache in caches:
        cache[0] = 0.0
    order = (torch.randperm(pages - 1) + 1).tolist()
    table = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, length in enumerate(lengths):
        mine = [order.pop() for _ in range(-(-length // page))]
        table[row, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for cache in caches:
            values = torch.randn(length, kv_heads, dim, device=device).to(dtype)
            for index, number in enumerate(mine):
                part = values[index * page : (index + 1) * page]
                cache[number, : len(part)] = part
    q = torch.randn(len(lengths), heads, dim, device=device).to(dtype)
    return q, caches[0], caches[1], table.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


TINY = [
    pytest.param([5, 0, 130, 1], 2, 1, 16, 16, id="tiny-mixed"),
    pytest.param([300], 3, 3, 32, 16, id="tiny-split"),
    pytest.param([70, 64, 9], 4, 2, 16, 4, id="tiny-page-of-4"),
    pytest.param([70, 9], 2, 1, 16, 12, id="tiny-page-of-12"),
    pytest.param([70, 200], 2, 1, 16, 64, id="tiny-page-of-64"),
    pytest.param([3, 41], 20, 2, 16, 1, id="tiny-page-of-1-group-of-10"),
    pytest.param([70, 0, 300, 9], 4, 2, 24, 16, id="tiny-dim-24"),
]
FULL = [
    pytest.param([1000], 32, 8, 128, 16, id="one"),
    pytest.param([100_000], 32, 8, 128, 16, id="long"),
    pytest.param([1, 2, 17, 0, 4096, 63, 64, 65], 32, 8, 128, 16, id="uneven"),
    pytest.param([777] * 100, 14, 2, 64, 16, id="group-of-7"),
    pytest.param([900, 5000], 16, 8, 128, 32, id="group-of-2"),
    pytest.param([333] * 5, 8, 8, 256, 8, id="dim-256"),
    pytest.param([20] * 300, 32, 1, 64, 16, id="many-short"),
    pytest.param([1, 33, 0, 4096, 700], 32, 4, 128, 16, id="groups-of-8"),
    pytest.param([900, 5000, 0, 33], 32, 32, 96, 16, id="dim-96"),
    pytest.param([333] * 70, 32, 8, 80, 16, id="dim-80"),
    pytest.param([4100], 32, 32, 100, 16, id="dim-100"),
    pytest.param([20_000, *[300] * 140, 0, 31, 1], 28, 4, 128, 16, id="many-groups-of-7"),
]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "dim", "page"), TINY + FULL)
def test_attention_over_pages_is_the_references(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    inputs = paged(lengths, heads, kv_heads, dim, page, dtype, device)
    decode = decode_attention.PagedDecode()
    out = torch.full_like(inputs[0], float("nan"))
    decode(*inputs, dim**-0.5, out=out)
    again = decode(*inputs, dim**-0.5)
    assert relative_error(out, reference(*inputs, dim**-0.5)) < tolerance(dtype)
    assert torch.equal(out, again)  # parts are added up in order, and counters are 0 again
    assert not out[inputs[4] == 0].any()


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [1, 16, 40, 1000])
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [pytest.param([5, 90, 41], 16, id="tiny"), pytest.param([40, 41, 4096, 1001, 0, 16], 128, id="full")],
)
def test_a_window_hides_what_is_older(lengths: list[int], dim: int, window: int, device: torch.device) -> None:
    inputs = paged(lengths, 4, 2, dim, 16, torch.float32, device)
    out = decode_attention.PagedDecode()(*inputs, 0.3, window=window)
    assert relative_error(out, reference(*inputs, 0.3, window)) < tolerance(torch.float32)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.7, False), (None, True), (2.0, True)], ids=["cap", "sinks", "both"])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim"),
    [
        pytest.param([5, 0, 90, 300, 1], 4, 2, 16, id="tiny"),
        pytest.param([40, 41, 4096, 1001, 0, 16], 64, 8, 64, id="group-of-8"),
        pytest.param([777] * 70, 16, 8, 256, id="dim-256"),
        pytest.param([30_000], 8, 4, 128, id="long"),
    ],
)
def test_scores_are_capped_and_sinks_take_their_share(
    lengths: list[int], heads: int, kv_heads: int, dim: int, softcap: float | None, sinks: bool, window: int | None,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    inputs = paged(lengths, heads, kv_heads, dim, 16, dtype, device)
    rule = Scores(softcap, torch.randn(heads, device=device) * 3 if sinks else None)
    out = decode_attention.PagedDecode()(*inputs, dim**-0.5, window=window, scores=rule)
    assert relative_error(out, reference(*inputs, dim**-0.5, window, rule)) < tolerance(dtype)
    assert not out[inputs[4] == 0].any()


@pytest.mark.parametrize("piece", [1, 2, 5, 40])
@pytest.mark.parametrize("crowd", [1, 4])
def test_the_result_does_not_depend_on_the_config_tiny(crowd: int, piece: int, device: torch.device) -> None:
    inputs = paged([5, 90, 0, 200, 33], 4, 2, 16, 16, torch.float32, device)
    config = DecodeConfig(block=16, stages=2, warps=4, crowd=crowd, piece=piece)
    out = decode_attention.PagedDecode()(*inputs, 0.25, config=config)
    assert relative_error(out, reference(*inputs, 0.25)) < tolerance(torch.float32)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[400], [0, 130, 300, 7, 500]], ids=["one", "some"])
def test_parts_are_added_up_in_groups_tiny(lengths: list[int], at_once: int, device: torch.device) -> None:
    inputs = paged(lengths, 4, 2, 16, 16, torch.float32, device)
    config = DecodeConfig(block=16, stages=2, warps=2, crowd=4, merged=at_once * 32)
    decode = decode_attention.PagedDecode()
    out = decode(*inputs, 0.25, config=config)
    assert relative_error(out, reference(*inputs, 0.25)) < tolerance(torch.float32)
    assert torch.equal(out, decode(*inputs, 0.25, config=config))


def test_a_layout_it_cannot_read_is_refused_tiny(device: torch.device) -> None:
    q, k, v, table, lens = paged([5], 2, 1, 16, 16, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous"):
        decode_attention.PagedDecode()(q, k[:, ::2], v, table, lens, 1.0)
    for dim in (12, 15):
        with pytest.raises(ValueError, match="an even number from 16"):
            decode_attention.PagedDecode()(q[:, :, :dim], k, v, table, lens, 1.0)


# ---- FP8 caches ----------------------------------------------------------------------------------------------------

K_SCALE, V_SCALE = 0.37, 2.5


def narrow_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "dim", "page"),
    [
        pytest.param([5, 0, 130, 1], 4, 1, 64, 16, id="tiny-pairs"),
        pytest.param([70, 9], 2, 1, 16, 4, id="tiny-bytes"),
        pytest.param([5, 0, 130, 1], 4, 1, 48, 16, id="tiny-pairs-of-48"),
        *FULL,
    ],
)
def test_codes_are_read_with_their_scales(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, device: torch.device
) -> None:
    q, k, v, table, lens = paged(lengths, heads, kv_heads, dim, page, narrow_dtype(device), device)
    k_codes, v_codes = (encode(cache, scale) for cache, scale in ((k, K_SCALE), (v, V_SCALE)))
    decode = decode_attention.PagedDecode()
    calls = [decode(q, k_codes, v_codes, table, lens, 0.1 * K_SCALE, value_scale=V_SCALE) for _ in range(2)]
    expected = reference(q, k_codes.float() * K_SCALE, v_codes.float() * V_SCALE, table, lens, 0.1)
    for out in calls:
        assert out.dtype == q.dtype
        assert relative_error(out, expected) < tolerance(q.dtype)
    assert torch.equal(*calls)


@pytest.mark.parametrize("window", [1, 40])
def test_codes_outside_a_window_are_hidden_tiny(window: int, device: torch.device) -> None:
    q, k, v, table, lens = paged([5, 90, 41], 4, 2, 64, 16, narrow_dtype(device), device)
    k, v = encode(k, 1.0), encode(v, 1.0)
    out = decode_attention.PagedDecode()(q, k, v, table, lens, 0.3, window=window)
    assert relative_error(out, reference(q, k.float(), v.float(), table, lens, 0.3, window)) < tolerance(q.dtype)


def test_queries_in_float32_read_codes_tiny(device: torch.device) -> None:
    q, k, v, table, lens = paged([33, 70], 4, 2, 64, 16, torch.float32, device)
    k, v = encode(k, 1.0), encode(v, V_SCALE)
    out = decode_attention.PagedDecode()(q, k, v, table, lens, 0.3, value_scale=V_SCALE)
    assert relative_error(out, reference(q, k.float(), v.float() * V_SCALE, table, lens, 0.3)) < tolerance(q.dtype)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e5, 1e30])
def test_queries_beyond_float16_keep_their_size_tiny(size: float, device: torch.device) -> None:
    """Products of bfloat16 queries and codes are computed in float16."""
    q, k, v, table, lens = paged([40, 7, 90], 4, 1, 64, 16, torch.bfloat16, device)
    q[:, 1] = 0.0
    k, v = encode(k, 1.0), encode(v, 1.0)
    out = decode_attention.PagedDecode()((q.float() * size).to(q.dtype), k, v, table, lens, 0.2 / size)
    expected = reference((q.float() * size).to(q.dtype), k.float(), v.float(), table, lens, 0.2 / size)
    assert relative_error(out, expected) < 6e-3


def test_queries_with_all_scores_zero_weight_every_key_equally_tiny(device: torch.device) -> None:
    q, k, v, table, lens = paged([40, 7, 0], 4, 1, 64, 16, torch.bfloat16, device)
    k, v, q = encode(k, 1.0), encode(v, 1.0), q * 1e-38
    out = decode_attention.PagedDecode()(q, k, v, table, lens, 1e-9)
    assert relative_error(out, reference(q, k.float(), v.float(), table, lens, 1e-9)) < 6e-3


def test_a_query_that_is_not_finite_is_visible_and_does_not_affect_others(device: torch.device) -> None:
    q, k, v, table, lens = paged([40, 7, 90], 4, 1, 64, 16, torch.bfloat16, device)
    k, v = encode(k, 1.0), encode(v, 1.0)
    expected = decode_attention.PagedDecode()(q, k, v, table, lens, 0.2)
    q[0, 2, 5], q[1, 0, 0] = float("nan"), float("inf")
    out = decode_attention.PagedDecode()(q, k, v, table, lens, 0.2)
    assert out[0, 2].isnan().all()
    assert out[1, 0].isnan().all()
    assert torch.equal(out[2], expected[2])

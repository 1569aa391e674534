from __future__ import annotations

import pytest
import torch

from aengine.kernels.attention.decode_config import DecodeConfig
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
) -> torch.Tensor:
    """One row at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    for row, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        low = max(0, length - window) if window else 0
        k, v = (cache[page_table[row].long()].flatten(0, 1)[low:length].double() for cache in (k_cache, v_cache))
        scores = torch.einsum("hd,shd->hs", q[row].double(), k.repeat_interleave(group, 1)) * scale
        out[row] = torch.einsum("hs,shd->hd", scores.softmax(-1), v.repeat_interleave(group, 1))
    return out


def paged(
    lengths: list[int], heads: int, kv_heads: int, dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, caches, page table and lengths; what no row owns is NaN, as a page's stale contents may be."""
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
]
FULL = [
    pytest.param([1000], 32, 8, 128, 16, id="one"),
    pytest.param([100_000], 32, 8, 128, 16, id="long"),
    pytest.param([1, 2, 17, 0, 4096, 63, 64, 65], 32, 8, 128, 16, id="uneven"),
    pytest.param([777] * 100, 14, 2, 64, 16, id="group-of-7"),
    pytest.param([900, 5000], 16, 8, 128, 32, id="group-of-2"),
    pytest.param([333] * 5, 8, 8, 256, 8, id="dim-256"),
    pytest.param([20] * 300, 32, 1, 64, 16, id="many-short"),
]


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
    assert torch.equal(
        out, again
    )  # whoever arrives last: the parts are added up in order, and the counters are back at 0
    assert not out[inputs[4] == 0].any()


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
@pytest.mark.parametrize(
    ("lengths", "dim"),
    [pytest.param([5, 90, 41], 16, id="tiny"), pytest.param([40, 41, 4096, 1001, 0, 16], 128, id="full")],
)
def test_a_window_hides_what_is_older(lengths: list[int], dim: int, window: int, device: torch.device) -> None:
    inputs = paged(lengths, 4, 2, dim, 16, torch.float32, device)
    out = decode_attention.PagedDecode()(*inputs, 0.3, window=window)
    assert relative_error(out, reference(*inputs, 0.3, window)) < tolerance(torch.float32)


@pytest.mark.parametrize("crowd", [1, 4])
def test_the_result_does_not_hang_on_how_the_work_is_cut_tiny(crowd: int, device: torch.device) -> None:
    inputs = paged([5, 90, 0, 200, 33], 4, 2, 16, 16, torch.float32, device)
    config = DecodeConfig(block=16, stages=2, warps=4, crowd=crowd)
    out = decode_attention.PagedDecode()(*inputs, 0.25, config=config)
    assert relative_error(out, reference(*inputs, 0.25)) < tolerance(torch.float32)


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
    with pytest.raises(ValueError, match="power of two"):
        decode_attention.PagedDecode()(q[:, :, :12], k, v, table, lens, 1.0)

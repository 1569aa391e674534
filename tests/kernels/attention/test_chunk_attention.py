"""Prefill chunks over pages of latents against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import FP8
from tests.kernels.attention.test_decode_attention import paged
from tests.kernels.attention.test_latent_decode import coded, latents
from tests.kernels.conftest import relative_error, tolerance

chunks = pytest.importorskip("aengine.kernels.attention.chunk_attention")
pytestmark = pytest.mark.gpu

Work = list[tuple[int, int]]  # (context, queries)
CASES = [
    pytest.param([(5, 5), (130, 40), (33, 1)], 2, 16, 16, 16, id="tiny-mixed"),
    pytest.param([(70, 70)], 3, 24, 8, 4, id="tiny-padded-page-of-4"),
    pytest.param([(20, 3), (9, 9)], 40, 16, 4, 12, id="tiny-more-heads-than-a-tile"),
    pytest.param([(600, 600), (2000, 300), (64, 1)], 16, 512, 64, 16, id="sixteen-heads"),
    pytest.param([(1000, 900), (31, 31)], 20, 512, 64, 16, id="twenty-heads"),
    pytest.param([(500, 100), (17, 5)], 128, 512, 64, 32, id="many-heads"),
]


def reference(q: Tensor, cache: Tensor, table: Tensor, work: Work, rank: int, scale: float) -> Tensor:
    """Compute each sequence in float64 with a bottom-right causal mask."""
    out, start = [], 0
    for row, (context, queries) in enumerate(work):
        kept = cache[table[row].long()].flatten(0, 2)[:context].double()
        scores = torch.einsum("qhd,kd->hqk", q[start : start + queries].double(), kept) * scale
        hidden = torch.ones(queries, context, dtype=torch.bool, device=q.device).triu(context - queries + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("hqk,kd->qhd", weights, kept[:, :rank]))
        start += queries
    return torch.cat(out)


def step(
    work: Work, heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return queries, cache, page table, lengths and query starts."""
    _, cache, table, lens = latents([context for context, _ in work], 1, rank, turned, page, dtype, device)
    starts = torch.tensor([0, *(queries for _, queries in work)], device=device).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), heads, rank + turned, device=device).to(dtype)
    return q, cache, table, lens, starts


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("work", "heads", "rank", "turned", "page"), CASES)
def test_a_query_sees_only_earlier_positions(
    work: Work, heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, cache, table, lens, starts = step(work, heads, rank, turned, page, dtype, device)
    scale = (rank + turned) ** -0.5
    out = chunks.attend_chunks(q, cache, cache[..., :rank], table, lens, starts, scale)
    assert relative_error(out, reference(q, cache, table, work, rank, scale)) < tolerance(dtype)
    assert torch.equal(out, chunks.attend_chunks(q, cache, cache[..., :rank], table, lens, starts, scale))


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize(("work", "heads", "rank", "turned", "page"), CASES)
def test_codes_are_latents_in_fp8(
    work: Work, heads: int, rank: int, turned: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    q, cache, table, lens, starts = step(work, heads, rank, turned, page, dtype, device)
    codes, exact = coded(cache)
    scale = 0.05 * (rank + turned) ** -0.5
    out = chunks.attend_chunks(q, codes, codes[..., :rank], table, lens, starts, scale, value_scale=0.05)
    assert relative_error(out, 0.05 * reference(q, exact, table, work, rank, scale)) < tolerance(dtype)


@pytest.mark.parametrize("size", [1e-30, 1e5, 1e30])
def test_queries_beyond_float16_keep_their_size_tiny(size: float, device: torch.device) -> None:
    """Products of bfloat16 queries and codes are computed in float16."""
    work = [(40, 12), (7, 7)]
    q, cache, table, lens, starts = step(work, 4, 16, 16, 16, torch.bfloat16, device)
    q[:, 1], q[:, 2, :16], q[:, 3, 16:] = 0.0, 0.0, 0.0
    q, (codes, exact) = (q.float() * size).to(q.dtype), coded(cache)
    out = chunks.attend_chunks(q, codes, codes[..., :16], table, lens, starts, 0.01 / size, value_scale=0.05)
    assert relative_error(out, 0.05 * reference(q, exact, table, work, 16, 0.01 / size)) < 6e-3


def test_tokens_outside_of_chunks_are_not_touched_tiny(device: torch.device) -> None:
    """Like a captured step: decodes come before the chunks, and unused chunks and tokens after them."""
    work = [(40, 12), (7, 7)]
    q, cache, table, lens, starts = step(work, 2, 16, 16, 16, torch.float32, device)
    before, behind = torch.randn(3, 2, 32, device=device), torch.randn(9, 2, 32, device=device)
    padded = torch.nn.functional.pad(starts + 3, (0, 3), value=3 + 19)
    more = torch.nn.functional.pad(lens, (0, 3))
    out = torch.full((31, 2, 16), 7.0, device=device)
    wide = torch.nn.functional.pad(table, (0, 0, 0, 3))
    chunks.attend_chunks(torch.cat((before, q, behind)), cache, cache[..., :16], wide, more, padded, 0.3, out=out)
    assert relative_error(out[3:22], reference(q, cache, table, work, 16, 0.3)) < tolerance(torch.float32)
    assert bool((out[:3] == 7).all())
    assert bool((out[22:] == 7).all())


def wide_reference(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, work: Work, window: int | None, rule: Scores = PLAIN,
    ends: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Reference for heads with separate keys and values; scale 0.1. ends: as of `attend_chunks`."""
    out, start, group = [], 0, q.shape[1] // k.shape[2]
    for row, (context, queries) in enumerate(work):
        keys, values = (
            cache[table[row].long()].flatten(0, 1)[:context].double().repeat_interleave(group, 1) for cache in (k, v)
        )
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), keys) * 0.1
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        at = torch.arange(context - queries, context, device=q.device)[:, None]
        last = at if ends is None else torch.maximum(at, ends[start : start + queries, None] - 1)
        key = torch.arange(context, device=q.device)
        scores = scores.masked_fill((key > last) | (key <= at - (window or context + 1)), float("-inf"))
        total = scores.logsumexp(-1, keepdim=True)
        if rule.sinks is not None:
            total = total.logaddexp(rule.sinks.double()[:, None, None])
        out.append(torch.einsum("hqk,khd->qhd", (scores - total).exp(), values))
        start += queries
    return torch.cat(out)


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (1.5, False), (None, True)], ids=["", "cap", "sinks"])
@pytest.mark.parametrize(
    ("work", "heads", "kv_heads", "dim"),
    [
        pytest.param([(5, 5), (130, 40), (33, 1)], 4, 2, 16, id="tiny"),
        pytest.param([(600, 600), (2000, 300), (64, 1)], 8, 1, 512, id="one"),
        pytest.param([(1000, 900), (31, 31)], 32, 4, 512, id="four"),
    ],
)
def test_heads_have_keys_and_values_of_their_own(
    work: Work, heads: int, kv_heads: int, dim: int, softcap: float | None, sinks: bool, window: int | None,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    _, k, v, table, lens = paged([context for context, _ in work], 1, kv_heads, dim, 16, dtype, device)
    starts = torch.tensor([0, *(queries for _, queries in work)], device=device).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), heads, dim, device=device).to(dtype)
    rule = Scores(softcap, torch.randn(heads, device=device) * 3 if sinks else None)
    out = chunks.attend_chunks(q, k, v, table, lens, starts, 0.1, window, rule)
    assert relative_error(out, wide_reference(q, k, v, table, work, window, rule)) < tolerance(dtype)
    if window is None:
        (k_codes, k), (v_codes, v) = coded(k / 20), coded(v)
        out = chunks.attend_chunks(q, k_codes, v_codes, table, lens, starts, 0.1, None, rule, value_scale=0.05)
        assert relative_error(out, 0.05 * wide_reference(q, k, v, table, work, None, rule)) < tolerance(dtype)


Images = list[list[tuple[int, int]]]  # of each sequence: the positions of its images, first and end
# A prefix ends within an image, images follow each other, and the last one is cut by the end of the context.
SEEING: list[tuple[Work, Images]] = [
    ([(5, 5), (130, 40), (33, 1), (60, 50)], [[], [(85, 94), (94, 99), (120, 128)], [], [(8, 30), (57, 70)]]),
    ([(600, 600), (2000, 300), (64, 64)], [[(3, 259), (261, 517)], [(1600, 1856)], []]),
]


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize(
    ("case", "heads", "kv_heads", "dim"),
    [pytest.param(0, 4, 2, 16, id="tiny"), pytest.param(1, 16, 8, 256, id="gemma"), pytest.param(1, 32, 4, 512)],
)
def test_tokens_of_an_image_see_all_of_it(
    case: int, heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    work, images = SEEING[case]
    _, k, v, table, lens = paged([context for context, _ in work], 1, kv_heads, dim, 16, dtype, device)
    starts = torch.tensor([0, *(queries for _, queries in work)], device=device).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), heads, dim, device=device).to(dtype)
    ends = ends_of(work, images).to(device)
    expected = wide_reference(q, k, v, table, work, window, ends=ends)
    out = torch.full_like(q, 7.0)
    assert chunks.attend_chunks(q, k, v, table, lens, starts, 0.1, window, out=out, ends=ends) is out
    seeing = ends > 0
    assert relative_error(out[seeing], expected[seeing]) < tolerance(dtype)
    assert bool((out[~seeing] == 7).all())
    (k_codes, k), (v_codes, v) = coded(k / 20), coded(v)
    expected = 0.05 * wide_reference(q, k, v, table, work, window, ends=ends)
    chunks.attend_chunks(q, k_codes, v_codes, table, lens, starts, 0.1, window, out=out, value_scale=0.05, ends=ends)
    assert relative_error(out[seeing], expected[seeing]) < tolerance(dtype)


def ends_of(work: Work, images: Images) -> Tensor:
    """Return the position after the image of each query; 0 for text."""
    return torch.tensor(
        [
            next((end for first, end in placed if first <= at < end), 0)
            for (context, queries), placed in zip(work, images, strict=True)
            for at in range(context - queries, context)
        ]
    )


def test_a_layout_it_cannot_read_is_refused_tiny(device: torch.device) -> None:
    q, cache, table, lens, starts = step([(40, 12)], 2, 16, 16, 16, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous"):
        chunks.attend_chunks(q, cache, cache[..., :16].contiguous(), table, lens, starts, 1.0)
    with pytest.raises(ValueError, match="for queries of"):
        chunks.attend_chunks(q, cache.half(), cache[..., :16], table, lens, starts, 1.0)
    with pytest.raises(ValueError, match="for queries of"):
        chunks.attend_chunks(q, cache.to(FP8), cache[..., :16], table, lens, starts, 1.0)

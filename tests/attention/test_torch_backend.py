"""The reference backend equals attention in float64. Pages are shuffled, and memory outside of contexts is NaN."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from aengine.attention import torch_backend
from aengine.attention.base import AttentionBatch, AttentionLayer
from aengine.attention.torch_backend import TorchAttention
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import FP8

DIM = 8
SCALE = 0.3

Work = list[tuple[int, int]]  # (context, query tokens): decodes have one query token


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, rule: Scores = PLAIN) -> Tensor:
    """Attend with the last queries of a context. q [queries, heads, dim]; k, v [context, kv_heads, dim]; float64."""
    queries, heads, _ = q.shape
    context, kv_heads, _ = k.shape
    out = torch.empty_like(q)
    for i in range(queries):
        last = context - queries + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            scores = k[first : last + 1, kv_head] @ q[i, head] * SCALE
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = scores.exp()
            sink = 0.0 if rule.sinks is None else rule.sinks[head].double().exp()
            out[i, head] = weights @ v[first : last + 1, kv_head] / (weights.sum() + sink)
    return out


def check(
    decodes: list[int],
    chunks: Work,
    page_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    slack: int = 0,
    seed: int = 0,
    codes: bool = False,
    softcap: float | None = None,
    sinks: bool = False,
    queries: int = 1,
) -> None:
    """Run one step. decodes: their context lengths; slack: how much the host overstates these.

    codes: the caches are FP8, and values are to be multiplied with 0.3. queries: query tokens of each decode.
    """
    generator = torch.Generator().manual_seed(seed)
    work = [(context, queries) for context in decodes] + chunks
    num_pages = 1 + sum(-(-context // page_size) for context, _ in work)
    pages = list(range(1, num_pages))
    random.Random(seed).shuffle(pages)
    width = max(-(-(context + slack) // page_size) for context, _ in work)
    # Entries of a page table past the end of its sequence are invalid.
    table = torch.full((len(work), width), 2**30, dtype=torch.int32)
    caches = torch.full((2, num_pages, page_size, kv_heads, DIM), math.nan)
    contents = []
    for row, (context, _) in enumerate(work):
        own = [pages.pop() for _ in range(-(-context // page_size))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        kv = torch.randn(2, context, kv_heads, DIM, generator=generator)
        if codes:
            kv = kv.to(FP8).float()
        contents.append(kv)
        for position in range(context):
            caches[:, own[position // page_size], position % page_size] = kv[:, position]
    q = torch.randn(sum(count for _, count in work), kv_heads * group, DIM, generator=generator)
    counts = [count for _, count in work]
    batch = AttentionBatch(
        slots=torch.zeros(0, dtype=torch.int64),  # already written
        page_table=table,
        seq_lens=torch.tensor([context for context, _ in work], dtype=torch.int32),
        query_starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        num_decodes=len(decodes),
        decode_queries=queries,
        query_lens=counts,
        context_lens=[context + (slack if row < len(decodes) else 0) for row, (context, _) in enumerate(work)],
    )
    rule = Scores(softcap, torch.randn(kv_heads * group, generator=generator) if sinks else None)
    kept, value_scale = (caches.to(FP8), 0.3) if codes else (caches, 1.0)
    attend = TorchAttention().bind(AttentionLayer(DIM, SCALE, window, rule, value_scale))
    layers = [attend(q, kept[0], kept[1], batch) for _ in range(2)]
    expected = torch.cat(
        [
            plain_attention(part.double(), kv[0].double(), kv[1].double() * value_scale, window, rule)
            for part, kv in zip(q.split(counts), contents)
        ]
    )
    for out in layers:  # the second layer uses the plan of the first
        assert out.shape == q.shape
        torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


@st.composite
def chunk(draw: st.DrawFn) -> tuple[int, int]:
    context = draw(st.integers(1, 40))
    return context, draw(st.integers(1, context))


@given(
    decodes=st.lists(st.integers(1, 40), max_size=6),
    chunks=st.lists(chunk(), max_size=3),
    page_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    window=st.none() | st.integers(1, 41),
    slack=st.integers(0, 5),
    codes=st.booleans(),
    softcap=st.none() | st.sampled_from([0.5, 3.0]),
    sinks=st.booleans(),
    queries=st.sampled_from([1, 1, 2, 5]),
)
def test_any_mix_of_decodes_and_chunks(
    decodes: list[int],
    chunks: Work,
    page_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    slack: int,
    codes: bool,
    softcap: float | None,
    sinks: bool,
    queries: int,
) -> None:
    if decodes or chunks:
        decodes = [max(context, queries) for context in decodes]
        check(
            decodes, chunks, page_size, kv_heads, group, window, slack,
            codes=codes, softcap=softcap, sinks=sinks, queries=queries,
        )  # fmt: skip


@pytest.mark.parametrize("window", [None, 1, 16, 33])
@pytest.mark.parametrize("context", [15, 16, 17, 31, 32, 33])
def test_contexts_that_end_at_page_borders(context: int, window: int | None) -> None:
    check([context, 1], [(context, context), (context, 1), (context, 16 if context > 16 else 3)], 16, 2, 2, window)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_decodes_of_very_different_lengths_with_a_chunk(window: int | None, codes: bool) -> None:
    check([3, 300, 130, 7, 290, 550], [(20, 20)], 16, 1, 2, window, codes=codes)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("chunks", [[], [(20, 20)]], ids=["alone", "with a chunk"])
@pytest.mark.parametrize("decodes", [[9, 40, 3], [3, 300, 130, 7, 290, 550]], ids=["similar", "different"])
def test_each_query_of_a_decode_sees_the_positions_up_to_its_own(
    decodes: list[int], chunks: Work, window: int | None
) -> None:
    check(decodes, chunks, 16, 2, 2, window, queries=3)
    check(decodes, chunks, 16, 2, 2, window, softcap=0.5, sinks=True, queries=2)


@pytest.mark.parametrize("lens", [[9, 40, 3], [3, 300, 2, 0]])
def test_queries_that_are_not_causal_see_the_whole_context(lens: list[int]) -> None:
    """Each attends like the only query of a decode, also if there are more queries than tokens."""
    caches, q = torch.randn(2, 80, 4, 2, DIM), torch.randn(3 * len(lens), 4, DIM)
    table, attend = torch.randperm(79)[None, :75] + 1, TorchAttention().bind(AttentionLayer(DIM, SCALE))

    def run(lens: list[int], queries: int) -> Tensor:
        starts = torch.arange(len(lens) + 1, dtype=torch.int32) * queries
        batch = AttentionBatch(
            slots=torch.zeros(0, dtype=torch.int64), page_table=table.int().repeat(len(lens), 1),
            seq_lens=torch.tensor(lens, dtype=torch.int32), query_starts=starts, num_decodes=len(lens),
            query_lens=[queries] * len(lens), context_lens=lens, decode_queries=queries, causal_decodes=queries == 1,
        )  # fmt: skip
        return attend(q, caches[0], caches[1], batch)

    torch.testing.assert_close(run(lens, 3), run([length for length in lens for _ in range(3)], 1))


@pytest.mark.parametrize("window", [None, 5])
def test_chunks_longer_than_a_block_of_queries(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_QUERY_BLOCK", 4)
    check([9], [(23, 10), (9, 4), (13, 13)], 3, 2, 2, window)


def test_heads_share_keys_along_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of torch for CUDA confuses rows of the mask if the stride of heads is 0."""
    strides = set()

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        strides.add((k.stride()[:2], v.stride()[:2]))
        out: Tensor = scaled_dot_product_attention(q, k, v, **options)
        return out

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    check([], [(65, 65), (100, 33)], 16, 2, 3, window=16)
    assert strides == {((0, DIM), (0, DIM))}


@pytest.mark.parametrize(("queries", "padding"), [(1, 0), (3, 0), (3, 2)])
def test_a_padding_row_leaves_the_others_alone(queries: int, padding: int) -> None:
    caches = torch.randn(2, 4, 2, 1, DIM)
    q = torch.randn(2 * queries, 2, DIM)

    def run(rows: int) -> Tensor:
        batch = AttentionBatch(
            slots=torch.zeros(rows * queries, dtype=torch.int64),
            page_table=torch.tensor([[3, 1], [0, 0]], dtype=torch.int32)[:rows],
            seq_lens=torch.tensor([3, padding], dtype=torch.int32)[:rows],
            query_starts=torch.arange(rows + 1, dtype=torch.int32) * queries,
            num_decodes=rows,
            decode_queries=queries,
            query_lens=[queries] * rows,
            context_lens=[3, padding][:rows],
        )
        return TorchAttention().bind(AttentionLayer(DIM, SCALE))(q[: rows * queries], caches[0], caches[1], batch)

    padded = run(2)
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[:queries], run(1))


def test_bfloat16_is_as_good_as_its_rounding() -> None:
    torch.manual_seed(0)
    caches = torch.randn(2, 3, 16, 2, DIM)
    q = torch.randn(1, 4, DIM)
    batch = AttentionBatch(
        slots=torch.zeros(1, dtype=torch.int64),
        page_table=torch.tensor([[2, 1]], dtype=torch.int32),
        seq_lens=torch.tensor([21], dtype=torch.int32),
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        num_decodes=1,
        query_lens=[1],
        context_lens=[21],
    )
    attend = TorchAttention().bind(AttentionLayer(DIM, SCALE))
    half = attend(q.bfloat16(), caches[0].bfloat16(), caches[1].bfloat16(), batch)
    batch.plans.clear()
    full = attend(q, caches[0], caches[1], batch)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), full, atol=0.03, rtol=0.03)

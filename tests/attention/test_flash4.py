"""How flash-attn-4 is called, with a stand-in for its kernel: which keys are gathered, when, and how many at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch, AttentionLayer, attend_whole
from aengine.attention.flash_backend import import_flash4
from aengine.kernels.kv_scales import encode
from tests.kernels.conftest import device, relative_error

flash4 = pytest.importorskip("aengine.attention.flash4")

PAGE, KV_HEADS, DIM, SCALE = 4, 1, 16, 0.3
KEY_SCALE, VALUE_SCALE = 0.5, 3.0
__all__ = ["device"]


class Kernel:
    """Varlen attention over gathered keys in float32. It accepts neither pages nor FP8 codes."""

    def __init__(self) -> None:
        self.calls = 0
        self.keys = 0  # in all calls

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_k: Tensor,
        window_size: tuple[int | None, int | None] = (None, None),
        **_: Any,
    ) -> Tensor:
        self.calls += 1
        self.keys += int(seqused_k.sum())
        assert q.dtype == k.dtype == v.dtype
        out = torch.zeros_like(q)
        starts = cu_seqlens_q.tolist()
        for i, (place, context) in enumerate(zip(cu_seqlens_k.tolist(), seqused_k.tolist())):
            rows = slice(starts[i], starts[i + 1])
            keys, values = (x[place : place + context, 0].float() for x in (k, v))
            queries = rows.stop - rows.start
            hidden = torch.ones(queries, context, dtype=torch.bool, device=q.device).triu(context - queries + 1)
            if window_size[0] is not None:
                hidden |= torch.ones_like(hidden).tril(context - queries - window_size[0] - 1)
            scores = torch.einsum("qhd,kd->hqk", q[rows].float(), keys) * SCALE * KEY_SCALE
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,kd->qhd", weights, values).to(q.dtype)
        return out


def chunks_of(work: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor, AttentionBatch]:
    """Return queries, pages of K and V [2, pages, ...], and a batch. work: context and queries of each chunk."""
    counts = [-(-context // PAGE) for context, _ in work]
    pages = torch.randn(2, sum(counts) + 1, PAGE, KV_HEADS, DIM, device=device)
    order = iter((torch.randperm(sum(counts)) + 1).tolist())
    table = torch.zeros(len(work), max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    queries = [count for _, count in work]
    batch = AttentionBatch(
        slots=torch.zeros(0, dtype=torch.int64, device=device),
        page_table=table.to(device),
        seq_lens=torch.tensor([context for context, _ in work], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *queries], device=device).cumsum(0).to(torch.int32),
        num_decodes=0,
        query_lens=queries,
        context_lens=[context for context, _ in work],
    )
    return torch.randn(sum(queries), 2, DIM, device=device).to(torch.float16), pages, batch


@pytest.mark.gpu
@pytest.mark.parametrize(("most", "calls"), [(10_000, 1), (420, 2), (200, 3)])
def test_codes_are_always_gathered_in_groups_that_fit_tiny(
    most: int, calls: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4, "MOST_GATHERED", most)
    q, pages, batch = chunks_of([(9, 3), (16, 16), (5, 1)], device)
    k, v = encode(pages[0], KEY_SCALE), encode(pages[1], VALUE_SCALE)
    kernel = Kernel()
    attention = flash4.Flash4("test", kernel, longest=16)
    layer = AttentionLayer(DIM, SCALE * KEY_SCALE, value_scale=VALUE_SCALE)
    out = attention.bind(layer)(q, k, v, batch)
    assert kernel.calls == calls

    whole = [x.to(q.dtype)[batch.page_table.long()].flatten(0, 2) for x in (k.float(), v.float() * VALUE_SCALE)]
    expected = Kernel()(
        q,
        *whole,
        cu_seqlens_q=batch.query_starts,
        cu_seqlens_k=torch.arange(4) * PAGE * batch.page_table.shape[1],
        seqused_k=batch.seq_lens,
    )
    assert relative_error(out, expected) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize("decodes", [0, 2])
def test_a_window_gathers_only_the_pages_that_it_reaches_tiny(
    decodes: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries of decodes may come before the queries of chunks."""
    monkeypatch.setattr(flash4, "LEAST_GATHERING", 1)
    window = 5
    q, pages, batch = chunks_of([(31, 3), (16, 16), (20, 1)], device)
    q = torch.cat((q.new_zeros(decodes, *q.shape[1:]), q))
    k, v = pages.to(torch.float16)
    expected = Kernel()(
        q[decodes:],
        *(x[batch.page_table.long()].flatten(0, 2) for x in (k, v)),
        cu_seqlens_q=batch.query_starts,
        cu_seqlens_k=torch.arange(4) * PAGE * batch.page_table.shape[1],
        seqused_k=batch.seq_lens,
        window_size=(window - 1, 0),
    )
    batch.query_starts += decodes
    reached = [31 - 24, 16, 20 - 12]  # from the page with the first key that the first query sees
    for row, context in ((0, 24), (2, 12)):
        k[batch.page_table[row, : context // PAGE].long()] = torch.nan  # these pages belong to others now
    kernel = Kernel()
    out = flash4.Flash4("test", kernel).bind(AttentionLayer(DIM, SCALE, window))(q, k, v, batch)
    assert kernel.keys == sum(reached)
    assert relative_error(out[decodes:], expected) < 2e-3


def test_what_fits_a_captured_step() -> None:
    """A few tokens with many keys read the pages, unless the cache is FP8: its keys are always gathered."""
    contexts = [60_000, 60_000]
    assert flash4.Flash4("values", print).fits(100, contexts, 16)
    assert not flash4.Flash4("values", print).fits(1000, contexts, 16)
    assert not flash4.Flash4("codes", print, longest=1000).fits(100, contexts, 16)
    assert flash4.Flash4("codes", print, longest=150_000).fits(100, contexts, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 80, 128, 160])
def test_all_tokens_of_a_sequence_see_each_other(dim: int) -> None:
    kernel = import_flash4()
    if kernel is None or not torch.cuda.is_available():
        pytest.skip("needs flash-attn-4 and a GPU that it runs on")
    qkv = torch.randn(3, 259, 3 * 4, dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.chunk(3, dim=2)  # [sequences, tokens, heads, dim], strided
    found = flash4.Flash4("", kernel).attend_whole(q, k, v, 0.1)
    expected = attend_whole(q.double().cpu(), k.double().cpu(), v.double().cpu(), 0.1)
    assert relative_error(found.cpu(), expected) < 5e-3


def test_heads_that_the_kernel_does_not_take_are_attended_to_by_torch() -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise AssertionError("the kernel was called")

    for dim in (136, 20):
        x = torch.randn(2, 5, 3, dim)
        assert torch.equal(flash4.Flash4("", refuse).attend_whole(x, x, x, 0.1), attend_whole(x, x, x, 0.1))

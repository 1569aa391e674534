"""Chunked attention equals a mask over whole contexts, on both backends. The Triton kernels run in its interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aengine.attention.base import AttentionBatch, AttentionLayer
from aengine.attention.local_chunks import cut_into_chunks
from aengine.attention.torch_backend import TorchAttention

pytest.importorskip("triton")

from aengine.attention.flash_backend import TorchPrefill
from aengine.attention.triton_backend import TritonAttention, TritonPrefill
from tests.attention.test_triton_backend import PAGE, SCALE, Work, error, step
from tests.kernels.conftest import device, tolerance

__all__ = ["device"]

HEADS = (4, 2, 16)
CPU = torch.device("cpu")
# Contexts that end at borders of chunks, begin there, are within one, or touch several.
MIXED: tuple[list[int], Work] = ([1, 32, 33, 80, 95], [(64, 64), (40, 8), (97, 90), (33, 1), (32, 32), (70, 6)])


def masked(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, size: int) -> Tensor:
    """Attend sequence by sequence in float64. Positions of other chunks are hidden."""
    group, out, start = q.shape[1] // k_cache.shape[2], [], 0
    for row, (queries, context) in enumerate(zip(batch.query_lens, batch.seq_lens.tolist())):
        pages = batch.page_table[row, : -(-context // PAGE)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:context].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        at = torch.arange(context - queries, context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), k) * SCALE
        scores = scores.masked_fill((key > at) | (key // size != at // size), -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        start += queries
    return torch.cat(out)


@st.composite
def works(draw: st.DrawFn) -> Work:
    contexts = draw(st.lists(st.integers(1, 150), max_size=4))
    return [(context, draw(st.integers(1, context))) for context in contexts]


@given(
    decodes=st.lists(st.integers(1, 150), max_size=4), chunks=works(), pages=st.integers(1, 4), slack=st.integers(0, 3)
)
def test_any_step_equals_the_mask(decodes: list[int], chunks: Work, pages: int, slack: int) -> None:
    """slack: how much the host overstates lengths of decodes."""
    if not decodes and not chunks:
        return
    q, k, v, batch = step(decodes, chunks, *HEADS, torch.float32, CPU)
    batch.context_lens = [length + slack for length in decodes] + batch.context_lens[len(decodes) :]
    attend, size = TorchAttention().bind(AttentionLayer(16, SCALE)), pages * PAGE
    cut = cut_into_chunks(batch, size, PAGE)
    assert cut is cut_into_chunks(batch, size, PAGE)
    assert sum(cut.query_lens) == len(q)
    assert max(cut.context_lens) <= size
    assert error(attend(q, k, v, cut), masked(q, k, v, batch, size)) < 1e-6


def test_the_mask_matters() -> None:
    q, k, v, batch = step(*MIXED, *HEADS, torch.float32, CPU)
    assert error(TorchAttention().bind(AttentionLayer(16, SCALE))(q, k, v, batch), masked(q, k, v, batch, 32)) > 0.1


@pytest.mark.gpu
@pytest.mark.interpreted(8)
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kind", ["torch", "Triton"])
def test_the_kernels_equal_the_mask_tiny(kind: str, captured: bool, device: torch.device) -> None:
    """A captured step knows no lengths on the host. It has unused decodes and a chunk of padding, in page 0."""
    q, k, v, batch = step(*MIXED, *HEADS, torch.float32, device)
    expected = masked(q, k, v, batch, 32)
    if captured:
        if kind == "torch":
            pytest.skip("it reads lengths on the host")
        batch, q = _captured(batch), torch.cat((q, torch.randn(70, *q.shape[1:], device=device)))
    backend = TritonAttention(lambda: TorchPrefill("") if kind == "torch" else TritonPrefill())
    attend = backend.bind(AttentionLayer(16, SCALE))
    for _ in range(2):  # the second layer uses the first one's plan
        out = attend(q, k, v, cut_into_chunks(batch, 32, PAGE))
        assert error(out[: len(expected)], expected) < tolerance(torch.float32)
        assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.interpreted(8)
def test_a_captured_step_of_decodes_tiny(device: torch.device) -> None:
    q, k, v, batch = step(MIXED[0], [], *HEADS, torch.float32, device)
    captured = replace(batch, query_lens=[], context_lens=[])
    attend = TritonAttention(lambda: TritonPrefill()).bind(AttentionLayer(16, SCALE))
    out = attend(q, k, v, cut_into_chunks(captured, 32, PAGE))
    assert error(out, masked(q, k, v, batch, 32)) < tolerance(torch.float32)


def _captured(batch: AttentionBatch) -> AttentionBatch:
    """Add two unused decodes, 70 tokens of padding in a row that holds 40, and an unused chunk."""
    device, decodes, tokens = batch.seq_lens.device, batch.num_decodes, sum(batch.query_lens)
    none = torch.zeros(1, batch.page_table.shape[1], dtype=torch.int32, device=device)

    def insert(values: Tensor, unused: list[int], last: list[int]) -> Tensor:
        first, rest = values[:decodes], values[decodes:]
        return torch.cat((first, values.new_tensor(unused), rest, values.new_tensor(last)))

    return replace(
        batch,
        slots=torch.zeros(tokens + 70, dtype=torch.int64, device=device),
        page_table=torch.cat((batch.page_table[:decodes], none, none, batch.page_table[decodes:], none, none)),
        seq_lens=insert(batch.seq_lens, [-1, -1], [40, 0]),
        query_starts=insert(batch.query_starts, [decodes, decodes], [tokens + 70, tokens + 70]),
        num_decodes=decodes + 2,
        query_lens=[],
        context_lens=[],
    )


def test_what_it_does_not_take_is_refused() -> None:
    _, _, _, batch = step([40], [], *HEADS, torch.float32, CPU)
    with pytest.raises(ValueError, match="page_size: is 16"):
        cut_into_chunks(batch, 40, PAGE)
    _, _, _, drafted = step([40], [], *HEADS, torch.float32, CPU, queries=3)
    with pytest.raises(ValueError, match="speculation"):
        cut_into_chunks(drafted, 32, PAGE)

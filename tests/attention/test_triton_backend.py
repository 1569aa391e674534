"""The CUDA backend equals attention in float64: decodes, chunks and both, with every installed prefill kernel."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch import Tensor

from aengine.attention import flash_backend
from aengine.attention.base import AttentionBatch, AttentionLayer, PrefillKernel
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import FP8, encode

pytest.importorskip("triton")
triton_backend = pytest.importorskip("aengine.attention.triton_backend")
Flash4 = pytest.importorskip("aengine.attention.flash4").Flash4
pytestmark = pytest.mark.gpu

PAGE = 16
SCALE = 0.09
Work = list[tuple[int, int]]  # (context, query tokens)


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device("cuda", 0)


def prefill_path(name: str, device: torch.device, longest: int = 0) -> PrefillKernel:
    """Return the named prefill kernel. Skip if its package is not installed, or if the device cannot run it."""
    if name == "flash-attn-4":
        kernel = flash_backend.import_flash4()
        if kernel is None or torch.cuda.get_device_capability(device)[0] not in (9, 10):
            pytest.skip("flash-attn-4 is not installed, or not for this device")
        return Flash4("test", kernel, longest)
    if name == "flash-attn-2":
        if flash_backend._import("flash_attn") is None:
            pytest.skip("flash-attn 2 is not installed")
        return flash_backend.OnGathered(name, "test", flash_backend._flash2)
    return flash_backend.OnGathered(name, "test", flash_backend._torch_flash)


def step(
    decodes: list[int], chunks: Work, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
    queries: int = 1,
) -> tuple[Tensor, Tensor, Tensor, AttentionBatch]:  # fmt: skip
    """Return q, the caches and the batch. Memory outside of contexts is NaN.

    decodes: their context lengths. queries: query tokens of each decode.
    """
    work = [(context, queries) for context in decodes] + chunks
    pages = list(range(1, 1 + sum(-(-context // PAGE) for context, _ in work)))
    random.Random(0).shuffle(pages)
    caches = torch.randn(2, len(pages) + 1, PAGE, kv_heads, dim, device=device).to(dtype)
    caches[:, 0] = 0.0
    table = torch.zeros(len(work), max(-(-context // PAGE) for context, _ in work) + 1, dtype=torch.int32)
    for row, (context, _) in enumerate(work):
        own = [pages.pop() for _ in range(-(-context // PAGE))]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        if context % PAGE:
            caches[:, own[-1], context % PAGE :] = math.nan
    counts = [count for _, count in work]
    batch = AttentionBatch(
        slots=torch.zeros(0, dtype=torch.int64, device=device),  # already written
        page_table=table.to(device),
        seq_lens=torch.tensor([context for context, _ in work], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32),
        num_decodes=len(decodes),
        decode_queries=queries,
        query_lens=counts,
        context_lens=[context for context, _ in work],
    )
    return torch.randn(sum(counts), heads, dim, device=device).to(dtype), caches[0], caches[1], batch


def reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: AttentionBatch, window: int | None, rule: Scores = PLAIN
) -> Tensor:
    """Attend sequence by sequence in float64, aligned to the ends of contexts: causally, or as `mutual` says."""
    mutual = batch.mutual if batch.mutual is not None and batch.mutual.are_in(window) else None
    group = q.shape[1] // k_cache.shape[2]
    out, start = [], 0
    for row, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens)):
        pages = batch.page_table[row, : -(-context // PAGE)].long()
        k, v = (
            cache[pages].flatten(0, 1)[:context].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        position = torch.arange(context - queries, context, device=q.device)[:, None]
        key = torch.arange(context, device=q.device)
        ends = 0 if mutual is None else mutual.ends[start : start + queries, None]
        hidden = ((key > position) & (key >= ends)) | (key <= position - (window or context + 1))
        scores = torch.einsum("qhd,khd->hqk", q[start : start + queries].double(), k) * SCALE
        if rule.softcap is not None:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        total = scores.logsumexp(-1, keepdim=True)
        if rule.sinks is not None:
            total = total.logaddexp(rule.sinks.double()[:, None, None])
        out.append(torch.einsum("hqk,khd->qhd", (scores - total).exp(), v))
        start += queries
    return torch.cat(out)


def error(out: Tensor, expected: Tensor) -> float:
    difference = (out.double() - expected).norm() / expected.norm()
    return math.inf if bool(difference.isnan()) else float(difference)


STEPS = {
    "decodes": ([1, 17, 400, 16], []),
    "one chunk": ([], [(100, 100)]),
    "chunks of longer contexts": ([], [(500, 100), (64, 64), (33, 1), (700, 17)]),
    "both": ([5, 300], [(200, 77), (90, 90)]),
    "both, one token of each prompt": ([5, 300], [(200, 1), (1, 1)]),
    "a token more than blocks of queries": ([], [(65, 65), (300, 97), (200, 129)]),
    "chunks that are worth copying their pages": ([5, 300], [(2000, 700), (90, 90), (300, 300)]),
}


@pytest.mark.thinned
@pytest.mark.parametrize("path", ["flash-attn-4", "flash-attn-2", "torch flash"])
@pytest.mark.parametrize("case", STEPS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (14, 2, 64)])
def test_a_step_is_the_references(
    case: str, path: str, heads: int, kv_heads: int, dim: int, device: torch.device
) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], heads, kv_heads, dim, torch.bfloat16, device)
    backend = triton_backend.TritonAttention(lambda: prefill_path(path, device))
    attend = backend.bind(AttentionLayer(dim, SCALE))
    layers = [attend(q, k_cache, v_cache, batch) for _ in range(2)]
    for out in layers:
        assert error(out, reference(q, k_cache, v_cache, batch, None)) < 6e-3


@pytest.mark.thinned
@pytest.mark.parametrize("path", ["flash-attn-4", "flash-attn-2", "torch flash"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("case", STEPS)
def test_a_step_over_codes_is_the_references(case: str, window: int | None, path: str, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], 32, 8, 128, torch.bfloat16, device)
    k_cache, v_cache = encode(k_cache, 0.2), encode(v_cache, 3.0)
    backend = triton_backend.TritonAttention(lambda: prefill_path(path, device, longest=2000))
    attend = backend.bind(AttentionLayer(128, SCALE * 0.2, window, value_scale=3.0))
    expected = reference(q, k_cache.float() * 0.2, v_cache.float() * 3.0, batch, window)
    for _ in range(2):
        assert error(attend(q, k_cache, v_cache, batch), expected) < 6e-3


@pytest.mark.parametrize("case", STEPS)
def test_float32_queries_read_codes_exactly(case: str, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], 16, 8, 128, torch.float32, device)
    k_cache, v_cache = k_cache.to(FP8), v_cache.to(FP8)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, torch.float32))
    out = backend.bind(AttentionLayer(128, SCALE, value_scale=0.5))(q, k_cache, v_cache, batch)
    assert error(out, reference(q, k_cache.float(), v_cache.float() * 0.5, batch, None)) < 3e-6


@pytest.mark.thinned
@pytest.mark.parametrize("queries", [2, 5])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("chunks", [[], [(200, 77), (90, 90)]], ids=["alone", "with chunks"])
def test_decodes_of_several_queries(chunks: Work, window: int | None, queries: int, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step([5, 17, 400, 16, 3000], chunks, 32, 8, 128, torch.bfloat16, device, queries)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, torch.bfloat16))
    attend = backend.bind(AttentionLayer(128, SCALE, window))
    for _ in range(2):
        out = attend(q, k_cache, v_cache, batch)
        assert error(out, reference(q, k_cache, v_cache, batch, window)) < 6e-3


@pytest.mark.parametrize("chunks", [[], [(200, 77), (90, 90)]], ids=["alone", "with chunks"])
def test_decodes_of_several_queries_over_latents(chunks: Work, device: torch.device) -> None:
    q, cache, _, batch = step([5, 17, 400, 16], chunks, 16, 1, 576, torch.bfloat16, device, queries=3)
    backend = triton_backend.TritonAttention(lambda: pytest.fail("latents need no prefill kernel"))
    out = backend.bind(AttentionLayer(576, SCALE, latent_rank=512))(q, cache, cache, batch)
    assert error(out, reference(q, cache, cache, batch, None)[..., :512]) < 6e-3


@pytest.mark.parametrize("queries", [1, 3])
def test_a_captured_step_serves_other_lengths(queries: int, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step([700, 300, 64], [], 32, 8, 128, torch.bfloat16, device, queries)
    longest = batch.seq_lens.clone()
    backend = triton_backend.TritonAttention(lambda: pytest.fail("decodes need no prefill kernel"))
    attend = backend.bind(AttentionLayer(128, SCALE))
    attend(q, k_cache, v_cache, batch)
    graph = torch.cuda.CUDAGraph()
    batch.seq_lens.copy_(torch.tensor([0, queries, 5], device=device))
    with torch.cuda.graph(graph):
        out = attend(q, k_cache, v_cache, batch)
    batch.seq_lens.copy_(longest)
    graph.replay()
    assert error(out, reference(q, k_cache, v_cache, batch, None)) < 6e-3


def test_more_keys_than_are_copied_at_a_time_go_in_groups(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_backend, "MOST_GATHERED", 150)
    q, k_cache, v_cache, batch = step([9], [(100, 50), (40, 40), (700, 3), (8, 8)], 4, 2, 128, torch.bfloat16, device)
    backend = triton_backend.TritonAttention(lambda: prefill_path("torch flash", device))
    for _ in range(2):  # the second layer uses the first one's plan
        out = backend.bind(AttentionLayer(128, SCALE))(q, k_cache, v_cache, batch)
        assert error(out, reference(q, k_cache, v_cache, batch, None)) < 6e-3


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("path", ["flash-attn-4", "torch flash"])
@pytest.mark.parametrize("case", ["both", "chunks that are worth copying their pages"])
@pytest.mark.parametrize("window", [1, 40, 1000])
def test_a_window_hides_older_keys(window: int, case: str, path: str, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], 4, 2, 128, torch.bfloat16, device)
    backend = triton_backend.TritonAttention(lambda: prefill_path(path, device))
    out = backend.bind(AttentionLayer(128, SCALE, window))(q, k_cache, v_cache, batch)
    assert error(out, reference(q, k_cache, v_cache, batch, window)) < 6e-3


@pytest.mark.thinned(strength=1)
@pytest.mark.parametrize("path", ["flash-attn-4", "torch flash"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("softcap", "sinks"), [(1.5, False), (None, True)], ids=["cap", "sinks"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 4, 256), (64, 8, 64)])
@pytest.mark.parametrize("case", ["both", "chunks that are worth copying their pages"])
def test_scores_are_capped_and_sinks_take_their_share(
    case: str, heads: int, kv_heads: int, dim: int, softcap: float | None, sinks: bool, window: int | None, path: str,
    device: torch.device,
) -> None:  # fmt: skip
    q, k_cache, v_cache, batch = step(*STEPS[case], heads, kv_heads, dim, torch.bfloat16, device)
    backend = triton_backend.TritonAttention(lambda: prefill_path(path, device))
    rule = Scores(softcap, torch.randn(heads, device=device) * 3 if sinks else None)
    out = backend.bind(AttentionLayer(dim, SCALE, window, rule))(q, k_cache, v_cache, batch)
    assert error(out, reference(q, k_cache, v_cache, batch, window, rule)) < 6e-3


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("case", STEPS)
def test_float32_is_exact(case: str, window: int | None, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], 16, 8, 128, torch.float32, device)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, torch.float32))
    out = backend.bind(AttentionLayer(128, SCALE, window))(q, k_cache, v_cache, batch)
    assert error(out, reference(q, k_cache, v_cache, batch, window)) < 3e-6


@pytest.mark.parametrize("case", STEPS)
def test_heads_that_no_flash_kernel_takes(case: str, device: torch.device) -> None:
    q, k_cache, v_cache, batch = step(*STEPS[case], 16, 2, 512, torch.bfloat16, device)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, torch.bfloat16))
    out = backend.bind(AttentionLayer(512, SCALE))(q, k_cache, v_cache, batch)
    assert error(out, reference(q, k_cache, v_cache, batch, None)) < 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", STEPS)
def test_latents_are_keys_and_values_at_once(case: str, dtype: torch.dtype, device: torch.device) -> None:
    q, cache, _, batch = step(*STEPS[case], 20, 1, 576, dtype, device)
    backend = triton_backend.TritonAttention(lambda: pytest.fail("latents need no prefill kernel"))
    out = backend.bind(AttentionLayer(576, SCALE, latent_rank=512))(q, cache, cache, batch)
    expected = reference(q, cache, cache, batch, None)[..., :512]
    assert error(out, expected) < (6e-3 if dtype.itemsize == 2 else 3e-6)
    assert backend.capturable
    assert "latents" in backend.why


@pytest.mark.parametrize(("dtype", "why"), [(torch.bfloat16, "flash-attn|installed"), (torch.float32, "float32")])
def test_the_choice_says_what_runs_and_why(dtype: torch.dtype, why: str, device: torch.device) -> None:
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, dtype))
    backend.bind(AttentionLayer(128, SCALE))
    assert re.search(why, backend.why)


@pytest.mark.parametrize("decodes", [[], [5, 300, 17]])
@pytest.mark.parametrize("window", [None, 40])
def test_a_step_whose_numbers_only_the_device_knows(
    decodes: list[int], window: int | None, device: torch.device
) -> None:
    """The form of a step in a CUDA graph: room for 8 decodes and 5 chunks; unused places are padding."""
    work = [(200, 77), (40, 40), (30, 30)]  # the last chunk is the padding
    q, k_cache, v_cache, batch = step(decodes, work, 32, 8, 128, torch.bfloat16, device)
    expected = reference(q, k_cache, v_cache, batch, window)
    n, total = len(decodes), q.shape[0]
    table = torch.zeros(13, batch.page_table.shape[1], dtype=torch.int32, device=device)
    table[:n] = batch.page_table[:n]
    table[8:11] = batch.page_table[n:]
    lens = torch.full((13,), -1, dtype=torch.int32, device=device)
    lens[:n], lens[8:11], lens[11:] = batch.seq_lens[:n], batch.seq_lens[n:], 0
    starts = torch.full((14,), total, dtype=torch.int32, device=device)
    starts[: n + 1], starts[n + 1 : 8] = batch.query_starts[: n + 1], n
    starts[8:11] = batch.query_starts[n : n + 3]
    padded = AttentionBatch(batch.slots, table, lens, starts, num_decodes=8, query_lens=[], context_lens=[])
    padded.slots = torch.zeros(total, dtype=torch.int64, device=device)
    backend = triton_backend.TritonAttention(lambda: flash_backend.choose_prefill(device, torch.bfloat16))
    attend = backend.bind(AttentionLayer(128, SCALE, window))
    if not backend.capturable:
        pytest.skip("no prefill kernel here reads pages directly")
    out = attend(q, k_cache, v_cache, padded)
    assert error(out, expected) < 6e-3

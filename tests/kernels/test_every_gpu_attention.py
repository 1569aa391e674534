"""Kernels of attention compile for several GPUs and fit their shared memory.

Each shape is compiled for an H200, and every second one also for one of the other GPUs in turn. Each test has at least
one shape for each GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

pytest.importorskip("triton")

from aengine.kernels.attention import (
    chunk_attention,
    decode_attention,
    inputs,
    latent_decode,
    prefix_attention,
)
from aengine.kernels.attention.config import decode_config, tile_queries
from aengine.kernels.attention.heads import Heads
from aengine.kernels.linear.fp8.quantize import E4M3
from tests.kernels.gpus import (
    HAVE_FP8,
    Compiler,
    eighth,
    every_gpu,
    half,
    ints,
    longs,
    single,
)
from tests.kernels.offline import MARKS

pytestmark = [*MARKS, pytest.mark.slow, pytest.mark.turns("compiler", always=("H200",), every=2, each=True)]

compiler = every_gpu


@pytest.mark.parametrize(
    ("rows", "group", "dim", "new"),
    [
        (1, 4, 128, half),
        (16, 8, 128, half),
        (256, 8, 128, half),
        (64, 2, 64, half),
        (16, 4, 256, half),
        (8, 4, 256, single),
        (1, 8, 512, half),
        (64, 16, 512, half),
        (8, 4, 512, single),
    ],
)
def test_decode_attention(compiler: Compiler, rows: int, group: int, dim: int, new: Callable[..., Tensor]) -> None:
    q, cache = new(rows, 2 * group, dim), new(100, 16, 2, dim)
    config = decode_config(rows, group, dim, q.element_size(), compiler.gpu.launch)
    decode_attention.PagedDecode()(q, cache, cache, ints(rows, 50), ints(rows), 0.1)
    groups = compiler.gpu.launch.warp_groups
    assert compiler.shared[-1] <= config.shared_memory(group, dim, q.element_size(), warp_groups=groups)
    # CUDA reserves 1 KB for each program; all programs of a processor must fit.
    assert config.crowd * (compiler.shared[-1] + 1024) <= (compiler.gpu.shared_memory + 1) * 1024


@HAVE_FP8
@pytest.mark.parametrize(
    ("rows", "group", "dim", "new"),
    [(1, 4, 128, half), (2, 4, 128, half), (16, 8, 128, half), (256, 4, 128, half), (64, 2, 64, half),
     (100, 4, 256, half), (8, 4, 128, single), (8, 4, 32, half)],
)  # fmt: skip
def test_decode_attention_of_codes(
    compiler: Compiler, rows: int, group: int, dim: int, new: Callable[..., Tensor]
) -> None:
    q, cache = new(rows, 2 * group, dim), eighth(100, 16, 2, dim)
    config = decode_config(rows, group, dim, q.element_size(), compiler.gpu.launch, kept_size=1)
    decode_attention.PagedDecode()(q, cache, cache, ints(rows, 50), ints(rows), 0.1)
    groups = compiler.gpu.launch.warp_groups
    assert compiler.shared[-1] <= config.shared_memory(group, dim, q.element_size(), 1, warp_groups=groups)
    assert config.crowd * (compiler.shared[-1] + 1024) <= (compiler.gpu.shared_memory + 1) * 1024


@pytest.mark.parametrize(
    ("rows", "queries", "group", "dim", "new"),
    [
        (1, 2, 4, 128, half),
        (64, 5, 4, 128, half),
        (16, 5, 8, 128, half),
        (64, 17, 16, 128, half),
        (64, 4, 8, 256, half),
        (8, 5, 4, 128, single),
        (64, 5, 8, 64, half),
    ],
)
def test_decode_attention_of_drafts(
    compiler: Compiler, rows: int, queries: int, group: int, dim: int, new: Callable[..., Tensor]
) -> None:
    q, cache = new(rows * queries, 2 * group, dim), new(100, 16, 2, dim)
    columns = tile_queries(queries, group, dim) * group
    config = decode_config(rows, columns, dim, q.element_size(), compiler.gpu.launch, drafted=True)
    decode_attention.PagedDecode()(q, cache, cache, ints(rows, 50), ints(rows), 0.1, queries=queries)
    assert config.crowd * (compiler.shared[-1] + 1024) <= (compiler.gpu.shared_memory + 1) * 1024


@pytest.mark.parametrize("new", [half, single])
def test_attention_of_blocks(compiler: Compiler, new: Callable[..., Tensor]) -> None:
    """Their keys and values have no queries while prompts are read."""
    q, cache, heads = new(4 * 16, 8, 128), new(100, 16, 2, 128), Heads(0, new(128), new(128), 1e-6)
    decode_attention.PagedDecode()(q, cache, cache, ints(4, 50), ints(4), 0.1, queries=16, causal=False)
    inputs.qk_norm_rope_store(new(9, 4 * 128), heads, single(500, 128), longs(9), (cache, cache), longs(9))


LATENTS = [(16, half), (128, single), (20, half), (128, half)]  # float32 with the most heads only


@pytest.mark.parametrize(("heads", "new"), LATENTS)
def test_attention_over_latents(compiler: Compiler, heads: int, new: Callable[..., Tensor]) -> None:
    q, cache = new(40, heads, 576), new(100, 16, 1, 576)
    latent_decode.LatentDecode()(q, cache, 512, ints(40, 50), ints(40), 0.1)
    chunk_attention.attend_chunks(q, cache, cache[..., :512], ints(4, 50), ints(4), ints(5), 0.1)


@HAVE_FP8
@pytest.mark.parametrize(("heads", "new"), LATENTS[1:])
def test_attention_over_latents_in_fp8(compiler: Compiler, heads: int, new: Callable[..., Tensor]) -> None:
    q, cache = new(40, heads, 576), half(100, 16, 1, 576).to(E4M3)
    latent_decode.LatentDecode()(q, cache, 512, ints(40, 50), ints(40), 0.1)
    chunk_attention.attend_chunks(q, cache, cache[..., :512], ints(4, 50), ints(4), ints(5), 0.1)


@pytest.mark.parametrize("new", [half, single])
def test_attention_of_chunks_with_wide_heads(compiler: Compiler, new: Callable[..., Tensor]) -> None:
    q, cache = new(40, 8, 512), new(100, 16, 1, 512)
    chunk_attention.attend_chunks(q, cache, cache, ints(4, 50), ints(4), ints(5), 0.1)


@pytest.mark.parametrize(  # of Gemma 3, and of the two kinds of layers of Gemma 4
    ("heads", "kv_heads", "dim", "window"),
    [(16, 8, 256, None), (16, 8, 256, 1024), (32, 16, 128, 1024), (32, 4, 512, None)],
)
def test_attention_among_the_tokens_of_images(
    compiler: Compiler, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    for q in (half(40, heads, dim), single(40, heads, dim)):
        caches = [q.new_empty(100, 16, kv_heads, dim)]
        if compiler.gpu.capability >= 89:
            caches.append(eighth(100, 16, kv_heads, dim))
        for cache in caches:
            chunk_attention.attend_chunks(
                q, cache, cache, ints(4, 50), ints(4), ints(5), 0.1, window, out=q.new_empty(q.shape), ends=longs(40)
            )


def test_attention_to_shared_runs(compiler: Compiler) -> None:
    attend_shared(half(100, 16, 2, 128))


@HAVE_FP8
def test_attention_to_shared_runs_of_codes(compiler: Compiler) -> None:
    attend_shared(eighth(100, 16, 2, 128))


def attend_shared(cache: Tensor) -> None:
    q, table = half(64, 8, 128), ints(64, 50)
    runs = prefix_attention.SharedRuns(ints(64), ints(3), ints(2), ints(64))
    shared = prefix_attention.attend_shared(q, cache, cache, table, runs, 0.1)
    decode_attention.PagedDecode()(q, cache, cache, table, ints(64), 0.1, shared=shared)

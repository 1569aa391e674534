"""Compiles flash-attn-4's kernels into its cache on disk, in a process without a GPU."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch, AttentionLayer
from aengine.attention.flash4 import LEAST_GATHERING, Flash4
from aengine.attention.flash_backend import flash4_cache, import_flash4, keep_compiled
from aengine.kernels.attention.gather_pages import GatherPlan
from aengine.kernels.kv_scales import FP8
from aengine.kernels.offline import leave_out_compiler


class _CompiledElsewhere:
    """Stands for a kernel that another process compiles."""

    def export_to_c(self, **_: object) -> None:
        """Raise like a failed write to disk, which flash-attn-4 ignores."""
        raise RuntimeError("another process compiles this variant")


class _CompileShare:
    """Replaces `cutlass.cute.compile`: compiles every `count`-th variant, from number `index` on."""

    def __init__(self, compile_: Any, index: int, count: int) -> None:
        self._compile = compile_
        self._index = index
        self._count = count
        self._calls = -1

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._calls += 1
        if self._calls % self._count != self._index:
            return _CompiledElsewhere()
        return self._compile(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compile, name)


def compile_flash4(
    launch: Callable[[Flash4], None], capability: tuple[int, int], processors: int, index: int, count: int
) -> None:
    """Compile this process's share of what `launch` launches. Does nothing if there is no cache on disk."""
    name = f"sm_{capability[0]}{capability[1]}"
    os.environ.update(FLASH_ATTENTION_ARCH=name, CUTE_DSL_ARCH=f"{name}a", FLASH_ATTENTION_NUM_SMS=str(processors))
    keep_compiled()
    if flash4_cache() is None or (kernel := import_flash4()) is None:
        return
    leave_out_compiler()
    from torch._subclasses.fake_tensor import FakeTensorMode

    cute = importlib.import_module("cutlass.cute")
    vars(cute)["compile"] = _CompileShare(vars(cute)["compile"], index, count)
    with FakeTensorMode():
        launch(Flash4("offline", kernel))


def launch_layers(
    attention: Flash4,
    device: torch.device,
    *,
    tokens: Sequence[int],
    layers: Sequence[AttentionLayer],
    heads: int,
    kv_heads: int,
    page_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> None:
    """Launch every variant that these layers need for prefill steps of these sizes, on uninitialised tensors.

    Args:
        layers: Layers of one head_dim.
        tokens: The numbers of tokens of the steps to compile for.
    """

    def empty(*shape: int, of: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(*shape, dtype=of, device=device)

    # A long step may consist of short chunks. Chunks that do not fill a tile have separate kernels.
    shapes = dict.fromkeys((length, longest) for length in tokens for longest in (length, 1))
    for layer, (length, longest) in itertools.product(layers, shapes):
        bound, dim = attention.bind(layer), layer.head_dim
        if bound is None:
            raise ValueError(f"{attention.name} does not support heads of {dim}")
        q = empty(length, heads, dim, of=dtype)
        chunks = AttentionBatch(
            slots=empty(length, of=torch.int64),
            page_table=empty(2, 4),
            seq_lens=empty(2),
            query_starts=empty(3),
            num_decodes=0,
            query_lens=[longest, longest],
            context_lens=[],
        )
        if length >= LEAST_GATHERING or kv_dtype == FP8:
            gathered = empty(64, kv_heads, dim, of=dtype)
            bound.on_gathered(q, gathered, gathered, GatherPlan(empty(2), empty(3), empty(3), empty(2)), chunks)
        if kv_dtype != FP8:
            pages = empty(2, page_size, kv_heads, dim, of=dtype)
            bound.on_pages(q, pages, pages, chunks)

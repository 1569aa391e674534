"""Prefill attention through flash-attn-4: on K and V gathered from their pages, or directly on the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch, AttentionLayer, PrefillKernel, attend_whole
from aengine.attention.chunk_groups import MOST_GATHERED, attend_in_groups
from aengine.kernels.attention.gather_pages import GatherPlan, gather_pages, gathered_tokens, plan_gather
from aengine.kernels.kv_scales import FP8

HEADS = (16, 32, 64, 128, 256)  # head_dims that were tested; on Hopper the kernel also takes other multiples of 8
MOST_WHOLE = 128  # the largest head_dim for whole sequences that every device takes
LEAST_GATHERING = 512  # tokens of a step from which on gathering is faster than reading pages


class Flash4(PrefillKernel):
    """flash-attn-4."""

    name = "flash-attn-4"
    capturable = True

    def __init__(self, why: str, kernel: Callable[..., Any], longest: int = 0) -> None:
        """longest: the longest context of an FP8 cache, in tokens; 0: the cache is not FP8.

        The kernel reads no FP8, so keys and values of an FP8 cache are always gathered.
        """
        self.why = why
        self.kernel = kernel
        self._longest = longest
        self._gathered: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}  # K and V, [tokens, kv_heads, dim]

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        on_pages = tokens < LEAST_GATHERING and not self._longest
        return on_pages or sum(gathered_tokens(one, page_size) for one in contexts) <= self.most_gathered(page_size)

    def bind(self, layer: AttentionLayer) -> Flash4Layer | None:
        return Flash4Layer(self, layer) if layer.head_dim in HEADS else None

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.shape[-1] > MOST_WHOLE or q.shape[-1] % 8:
            return attend_whole(q, k, v, scale)
        return _output(self.kernel(q, k, v, softmax_scale=scale, causal=False))

    def most_gathered(self, page_size: int) -> int:
        """Return the most keys that are gathered at once, as `gathered_tokens` counts them."""
        return max(MOST_GATHERED, gathered_tokens(self._longest, page_size))

    def buffers(self, tokens: int, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return memory for gathered K and V, [tokens, kv_heads, dim] each. All layers of a shape share it.

        It begins as zeros, because unwritten memory must not hold NaN.
        """
        shape = (tokens, *cache.shape[2:])
        if (shape, dtype) not in self._gathered:
            self._gathered[shape, dtype] = (cache.new_zeros(shape, dtype=dtype), cache.new_zeros(shape, dtype=dtype))
        return self._gathered[shape, dtype]


class Flash4Layer:
    """flash-attn-4 for one layer."""

    def __init__(self, flash: Flash4, layer: AttentionLayer) -> None:
        self._flash = flash
        self._window = layer.window
        self._value_scale = layer.value_scale
        self._options: dict[str, Any] = {
            "softmax_scale": layer.scale,
            "causal": True,
            "window_size": (None, None) if layer.window is None else (layer.window - 1, 0),
        }
        if layer.scores.softcap is not None:
            self._options["softcap"] = layer.scores.softcap
        if layer.scores.sinks is not None:
            self._options["learnable_sink"] = layer.scores.sinks

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, /) -> Tensor:
        page_size = k_cache.shape[1]
        # Empty for a captured step: the caller checks `Flash4.fits` before it replays one.
        sizes = [gathered_tokens(seen, page_size) for seen in chunks.seen_lens(self._window, page_size)]
        most = self._flash.most_gathered(page_size)
        if k_cache.dtype != FP8 and (len(q) < LEAST_GATHERING or sum(sizes) > most):
            return self.on_pages(q, k_cache, v_cache, chunks)
        k, v = self._flash.buffers(most, k_cache, q.dtype)

        def attend(q: Tensor, group: AttentionBatch) -> Tensor:
            window = self._window
            plan = group.plan(GatherPlan, lambda: plan_gather(group.seq_lens, group.unseen(window), page_size), window)
            gather_pages(k_cache, v_cache, group.page_table, group.seq_lens, plan, k, v, self._value_scale)
            return self.on_gathered(q, k, v, plan, group)

        return attend_in_groups(q, chunks, sizes, most, self._window, attend)

    def on_gathered(self, q: Tensor, k: Tensor, v: Tensor, plan: GatherPlan, chunks: AttentionBatch) -> Tensor:
        """Attend to k and v [tokens, kv_heads, dim], which `gather_pages` copied according to `plan`."""
        longest = max(MOST_GATHERED, len(k))
        return self._launch(
            q, k, v, chunks, cu_seqlens_k=plan.starts, max_seqlen_k=longest, seqused_k=plan.lens, **self._options
        )

    def on_pages(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch) -> Tensor:
        """Attend to keys and values in their pages, without gathering."""
        return self._launch(
            q, k_cache, v_cache, chunks, page_table=chunks.page_table, seqused_k=chunks.seq_lens, **self._options
        )

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, chunks: AttentionBatch, **options: Any) -> Tensor:
        sizes: dict[str, Any] = {"cu_seqlens_q": chunks.query_starts, "max_seqlen_q": chunks.most_queries}
        return _output(self._flash.kernel(q, k, v, **sizes, **options))


def _output(returned: Tensor | tuple[Tensor, ...]) -> Tensor:
    return returned[0] if isinstance(returned, tuple) else returned

"""Prefill attention through flash-attn-4: on gathered K and V, or straight on the pages, unless these are FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.attention.chunk_groups import MOST_GATHERED, attend_in_groups
from aengine.kernels.attention.gather_pages import GatherPlan, gather_pages, gathered_tokens, plan_gather
from aengine.kernels.attention.heads import PLAIN, Scores
from aengine.kernels.kv_scales import FP8

HEADS = (16, 32, 64, 128, 256)
LEAST_GATHERING = 512  # chunks of fewer tokens gain less than the copy costs


class Flash4:
    """flash-attn-4."""

    name = "flash-attn-4"
    capturable = True

    def __init__(self, why: str, kernel: Callable[..., Any], longest: int = 0) -> None:
        """longest: context of an FP8 cache, which is always gathered, as the kernel reads 16 bits; 0: none is."""
        self.why = why
        self._kernel = kernel
        self._longest = longest
        self._gathered: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}  # K and V, [room, kv_heads, dim]

    @staticmethod
    def takes(dim: int, plain: bool) -> bool:
        """As `FlashAttention.takes`: those that were tried. Of others it takes multiples of 8, on Hopper."""
        return dim in HEADS

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """As `PrefillAttention.fits`."""
        on_pages = tokens < LEAST_GATHERING and not self._longest
        return on_pages or _room_for(contexts, page_size) <= self._most_gathered(page_size)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        value_scale: float = 1.0,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """As `PrefillAttention`."""
        page_size = k_cache.shape[1]
        # Of a captured step no lengths are known here; whoever replays it keeps them within the bound.
        sizes = [gathered_tokens(seen, page_size) for seen in chunks.seen_lens(window, page_size)]
        most = self._most_gathered(page_size)
        if k_cache.dtype != FP8 and (len(q) < LEAST_GATHERING or sum(sizes) > most):
            return self.on_pages(q, k_cache, v_cache, chunks, scale, window, scores)
        k, v = self._room(most, k_cache, q.dtype)

        def attend(q: Tensor, group: AttentionBatch) -> Tensor:
            plan = group.plan(GatherPlan, lambda: plan_gather(group.seq_lens, group.unseen(window), page_size), window)
            gather_pages(k_cache, v_cache, group.page_table, group.seq_lens, plan, k, v, value_scale)
            return self.on_gathered(q, k, v, plan, group, scale, window, scores)

        return attend_in_groups(q, chunks, sizes, most, window, attend)

    def on_gathered(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: GatherPlan,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """k, v [room, kv_heads, dim]: what `gather_pages` copied by this plan."""
        more = {"cu_seqlens_k": plan.starts, "max_seqlen_k": max(MOST_GATHERED, len(k)), "seqused_k": plan.lens}
        return _first(self._kernel(q, k, v, **more, **_options(chunks, scale, window, scores)))

    def on_pages(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        chunks: AttentionBatch,
        scale: float,
        window: int | None,
        scores: Scores = PLAIN,
    ) -> Tensor:
        """The caches as they are."""
        more = {"page_table": chunks.page_table, "seqused_k": chunks.seq_lens}
        return _first(self._kernel(q, k_cache, v_cache, **more, **_options(chunks, scale, window, scores)))

    def _most_gathered(self, page_size: int) -> int:
        """How many keys are gathered at a time, as `gathered_tokens` counts them."""
        return max(MOST_GATHERED, gathered_tokens(self._longest, page_size))

    def _room(self, tokens: int, cache: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Memory for all layers of a shape, one after the other. Zeros: what was never written must be no NaN."""
        shape = (tokens, *cache.shape[2:])
        if (shape, dtype) not in self._gathered:
            self._gathered[shape, dtype] = (cache.new_zeros(shape, dtype=dtype), cache.new_zeros(shape, dtype=dtype))
        return self._gathered[shape, dtype]


def _options(chunks: AttentionBatch, scale: float, window: int | None, scores: Scores) -> dict[str, Any]:
    more = {
        "softcap": scores.softcap,
        "learnable_sink": scores.sinks,
    }
    return {
        **{name: value for name, value in more.items() if value is not None},
        "cu_seqlens_q": chunks.query_starts,
        "max_seqlen_q": chunks.most_queries,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (None, None) if window is None else (window - 1, 0),
    }


def _first(out: Any) -> Tensor:
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _room_for(contexts: Sequence[int], page_size: int) -> int:
    return sum(gathered_tokens(context, page_size) for context in contexts)

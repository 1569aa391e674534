"""Prefill attention through flash-attn-4: on gathered K and V, or straight on the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from aengine.attention.base import AttentionBatch
from aengine.kernels.attention.gather_pages import GatherPlan, gather_pages, gathered_tokens, plan_gather

# Chunks of fewer tokens gain less than the copy costs; contexts of more are read from their pages.
LEAST_GATHERING = 512
MOST_GATHERED = 65536


class Flash4:
    """flash-attn-4."""

    name = "flash-attn-4"
    capturable = True

    def __init__(self, why: str, kernel: Callable[..., Any]) -> None:
        self.why = why
        self._kernel = kernel
        self._gathered: tuple[Tensor, Tensor] | None = None  # K and V, [MOST_GATHERED, kv_heads, dim]

    def fits(self, tokens: int, contexts: Sequence[int], page_size: int) -> bool:
        """As `PrefillAttention.fits`."""
        return tokens < LEAST_GATHERING or _room_for(contexts, page_size) <= MOST_GATHERED

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        """As `PrefillAttention`."""
        page_size = k_cache.shape[1]
        # Of a captured step no lengths are known here; whoever replays it keeps them within the bound.
        if len(q) >= LEAST_GATHERING and _room_for(chunks.context_lens, page_size) <= MOST_GATHERED:
            plan = chunks.plan(GatherPlan, lambda: plan_gather(chunks.seq_lens, page_size))
            k, v = self._room(k_cache)
            gather_pages(k_cache, v_cache, chunks.page_table, chunks.seq_lens, plan, k, v)
            return self.on_gathered(q, k, v, plan.starts, chunks, scale, window)
        return self.on_pages(q, k_cache, v_cache, chunks, scale, window)

    def on_gathered(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, chunks: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        """k, v [MOST_GATHERED, kv_heads, dim]: each sequence's from `starts` [seqs + 1] int32 on."""
        more = {"cu_seqlens_k": starts, "max_seqlen_k": MOST_GATHERED}
        return _first(self._kernel(q, k, v, **more, **_options(chunks, scale, window)))

    def on_pages(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, chunks: AttentionBatch, scale: float, window: int | None
    ) -> Tensor:
        """The caches as they are."""
        options = _options(chunks, scale, window)
        return _first(self._kernel(q, k_cache, v_cache, page_table=chunks.page_table, **options))

    def _room(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for all layers, one after the other. Zeros: what was never written must be no NaN."""
        shape = (MOST_GATHERED, *like.shape[2:])
        if self._gathered is None or self._gathered[0].shape != shape or self._gathered[0].dtype != like.dtype:
            self._gathered = (like.new_zeros(shape), like.new_zeros(shape))
        return self._gathered


def _options(chunks: AttentionBatch, scale: float, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": chunks.query_starts,
        "max_seqlen_q": max(chunks.query_lens),
        "seqused_k": chunks.seq_lens,
        "softmax_scale": scale,
        "causal": True,
        "window_size": (None, None) if window is None else (window - 1, 0),
    }


def _first(out: Any) -> Tensor:
    result: Tensor = out[0] if isinstance(out, tuple) else out
    return result


def _room_for(contexts: Sequence[int], page_size: int) -> int:
    return sum(gathered_tokens(context, page_size) for context in contexts)
